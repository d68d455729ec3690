"""Many prompts in one request: each an answer of its own, numbered prompt by prompt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.fakes import FakeEngine
from tests.server.api.talk import settled, story, usage_of, values_of
from tests.server.harness import Gate, InStep, Running, running

PROMPTS: list[Any] = [
    ["hi", "you", "there!"],
    [[104, 105], [121, 111, 117], list(b"there!")],
]
EXPECTED = [story(2, 9), story(3, 9), story(6, 9)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["texts", "lists of ids"])
async def test_each_prompt_is_answered_as_if_alone(server: Running, prompt: Any) -> None:
    answer = (await server.generate(prompt=prompt, max_tokens=9, seed=0)).json()
    assert [choice["text"] for choice in answer["choices"]] == EXPECTED
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"] == usage_of(11, 27)
    assert (answer["seed"], answer["session"], answer["position"]) == (0, None, None)
    assert (await settled(server)).held_slots == 0


async def test_choices_are_numbered_prompt_by_prompt(server: Running) -> None:
    answer = (await server.generate(prompt=["hi", "you"], max_tokens=9, seed=5, n=2)).json()
    texts = [story(2, 9, 5), story(2, 9, 6), story(3, 9, 5), story(3, 9, 6)]
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(texts))


async def test_drawn_seed_is_that_of_all_prompts(server: Running) -> None:
    first = (await server.generate(prompt=["hi", "you"], max_tokens=9)).json()
    again = (await server.generate(prompt=["hi", "you"], max_tokens=9, seed=first["seed"])).json()
    assert again["choices"] == first["choices"]


async def test_stream_of_a_batch_comes_mixed_under_the_right_numbers() -> None:
    async with running(FakeEngine(before_step=InStep())) as server:
        response = await server.generate(
            prompt=["hi", "you", "there!"],
            max_tokens=9,
            seed=0,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    *chunks, last = values_of(response)
    texts: dict[int, str] = dict.fromkeys(range(6), "")
    order = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        order.append(choice["index"])
    assert texts == {
        2 * i + n: story(size, 9, n) for i, size in enumerate((2, 3, 6)) for n in (0, 1)
    }
    assert order != sorted(order)
    assert last["usage"] == usage_of(11, 54)
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


async def test_list_of_one_prompt_is_one_prompt(server: Running) -> None:
    for prompt in (["hi"], [[104, 105]]):
        answer = (await server.generate(prompt=prompt, max_tokens=9, seed=0, keep=True)).json()
        assert answer["choices"][0]["text"] == story(2, 9)
        assert answer["session"] is not None
        assert answer["position"] == 11


async def test_more_prompts_than_the_queue_takes_follow_one_another() -> None:
    async with running(FakeEngine(max_sessions=2, max_running=2, max_waiting=3)) as server:
        prompts = ["x" * (1 + n % 7) for n in range(100)]
        answer = await server.generate(prompt=prompts, max_tokens=3, seed=0)
        assert answer.status_code == 200, answer.text
        texts = [choice["text"] for choice in answer.json()["choices"]]
        assert texts == [story(len(prompt), 3) for prompt in prompts]
        assert (await settled(server)).held_slots == 0


async def test_more_prompts_than_sessions_follow_one_another() -> None:
    async with running(FakeEngine(max_sessions=2)) as server:
        answer = await server.generate(prompt=["hi"] * 40, max_tokens=3, seed=0)
        assert [choice["text"] for choice in answer.json()["choices"]] == [story(2, 3)] * 40


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_that_fails_fails_the_batch(server: Running, stream: bool) -> None:
    prompts = ["hi", "<fail>", *["you"] * 60]
    response = await server.generate(prompt=prompts, max_tokens=40, seed=0, stream=stream)
    if stream and response.status_code == 200:
        values = values_of(response)
        assert [v["error"]["code"] for v in values if "error" in v] == ["internal_error"]
    else:
        assert response.json()["error"]["code"] == "internal_error"
    assert (await server.generate(prompt="hi", max_tokens=1)).status_code == 200
    assert (await settled(server)).held_slots == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_cancels_the_whole_batch(stream: bool) -> None:
    gate = Gate()
    async with running(FakeEngine(before_step=gate, max_running=2, max_waiting=4)) as server:
        body = json.dumps({"prompt": ["hi"] * 100, "max_tokens": 10**4, "stream": stream})
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write((head + body).encode())
        await gate.reached()
        writer.close()
        gate.open()
        await server.async_engine.drained()
        assert (await settled(server)).held_slots == 0
