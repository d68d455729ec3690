from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from server.engine.types import SamplingParams
from tests.fakes import STORY, FakeEngine
from tests.server.harness import Gate, Recorder, Running, running


def story(start: int, length: int, seed: int) -> str:
    return bytes(STORY[(seed * 7 + start + i) % len(STORY)] for i in range(length)).decode()


def sse_values(response: httpx.Response) -> list[Any]:
    """The values of a stream; its last line must be ``[DONE]``."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_json_answer_has_openai_shape(server: Running) -> None:
    response = await server.generate(model="fake", prompt="hi", max_tokens=20, seed=0, user="me")
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": story(2, 20, 0), "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22}
    assert (answer["session"], answer["seed"], answer["position"]) == (None, 0, 22)


async def test_drawn_seed_is_returned_and_repeats_the_answer(server: Running) -> None:
    first = (await server.generate(prompt="hi", max_tokens=12)).json()
    again = (await server.generate(prompt="hi", max_tokens=12, seed=first["seed"])).json()
    assert again["choices"] == first["choices"]


async def test_null_means_default(server: Running) -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "stream")
    names += ("stop_token_ids", "ignore_eos", "session", "keep", "stream_options", "user", "seed")
    names += ("presence_penalty", "frequency_penalty")
    response = await server.generate(prompt="hi", max_tokens=1, **dict.fromkeys(names))
    assert response.status_code == 200


async def test_penalties_reach_the_engine() -> None:
    engine = Recorder()
    async with running(engine) as server:
        await server.generate(
            prompt="hi", max_tokens=1, seed=0, presence_penalty=-2, frequency_penalty=1.5
        )
    assert engine.sampling == [
        SamplingParams(max_tokens=1, seed=0, presence_penalty=-2, frequency_penalty=1.5)
    ]


async def test_prompt_of_token_ids(server: Running) -> None:
    answer = (await server.generate(prompt=[104, 105], max_tokens=4, seed=0)).json()
    assert answer["choices"][0]["text"] == story(2, 4, 0)


async def test_end_of_text_stops(server: Running) -> None:
    answer = (await server.generate(prompt="THE END", max_tokens=40)).json()
    assert answer["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
    }


async def test_stop_string_is_not_shown(server: Running) -> None:
    answer = (await server.generate(prompt="hi", max_tokens=400, seed=0, stop="fox")).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == "ce upon a time there was a little "


async def test_stream_has_one_chunk_per_token_and_a_last_one(server: Running) -> None:
    response = await server.generate(prompt="hi", max_tokens=20, seed=0, stream=True)
    chunks = sse_values(response)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert len(chunks) == 21
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == story(2, 20, 0)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 20 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


async def test_stream_with_usage_ends_with_a_chunk_without_choices(server: Running) -> None:
    response = await server.generate(
        prompt="hi", max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = sse_values(response)
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}


async def test_kept_session_goes_on_where_it_was(server: Running) -> None:
    first = (await server.generate(prompt="hi", max_tokens=10, seed=0, keep=True)).json()
    second = (await server.generate(session=first["session"], max_tokens=10, seed=0)).json()
    assert second["session"] == first["session"]
    assert second["position"] == 22
    assert second["choices"][0]["text"] == story(12, 10, 0)
    assert second["usage"]["prompt_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_token_is_a_plain_500(server: Running, stream: bool) -> None:
    response = await server.generate(prompt="<fail>", stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert (await server.generate(prompt="hi", max_tokens=1)).status_code == 200


async def test_unknown_model_is_404(server: Running) -> None:
    response = await server.generate(model="other", prompt="hi")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_full_server_says_503_with_retry_after() -> None:
    async with running(FakeEngine(max_sessions=1)) as server:
        await server.http.post("/v1/sessions")
        response = await server.generate(prompt="hi")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "capacity_exhausted"
        assert int(response.headers["retry-after"]) >= 1


async def test_full_queue_says_429_with_retry_after() -> None:
    gate = Gate()
    async with running(FakeEngine(max_waiting=1, before_step=gate)) as server:
        first = asyncio.create_task(server.generate(prompt="hi", max_tokens=10**6))
        await gate.reached()
        gate.open()
        response = await server.generate(prompt="hi")
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        first.cancel()
        await server.driver.drained()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_frees_its_slot_at_once(stream: bool) -> None:
    gate = Gate()
    async with running(FakeEngine(before_step=gate)) as server:
        body = json.dumps({"prompt": "hi", "max_tokens": 1_000_000, "stream": stream})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write((head + body).encode())
        await gate.reached()
        writer.close()
        await writer.wait_closed()
        gate.open()
        async with asyncio.timeout(10):
            await server.driver.drained()
        assert (await server.stats()).held_slots == 0
