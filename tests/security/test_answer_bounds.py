"""What one request may make of memory and of the event loop by the size of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from benchmarks import sse
from server.errors import RequestError
from server.models.service import AT_ONCE, MAX_INLINE_BYTES, LargeAnswers
from tests.fakes import FakeEngine
from tests.server.harness import Running, running

PROMPT = [97 + index % 26 for index in range(2000)]
EVERYTHING: dict[str, Any] = {"echo": True, "logprobs": 20, "prompt_logprobs": 20}
ENDLESS = 1_000_000


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(max_sessions=128)) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": PROMPT, **EVERYTHING, "n": 128, "max_tokens": 1}, "n"),
        (
            "completions",
            {"prompt": PROMPT, **EVERYTHING, "n": 128, "max_tokens": 1, "stream": True},
            "n",
        ),
        (
            "completions",
            {"prompt": [PROMPT] * 60, "prompt_logprobs": 20, "max_tokens": 0},
            "prompt_logprobs",
        ),
        (
            "completions",
            {"prompt": [PROMPT] * 60, "echo": True, "logprobs": 20, "max_tokens": 0},
            "logprobs",
        ),
        (
            "completions",
            {"prompt": "a", "n": 128, "max_tokens": ENDLESS, "logprobs": 20},
            "max_tokens",
        ),
        ("completions", {"prompt": "a", "n": 128, "max_tokens": ENDLESS}, "max_tokens"),
        ("completions", {"prompt": ["a"] * 128, "max_tokens": ENDLESS}, "max_tokens"),
        (
            "completions",
            {"prompt": "a", "best_of": 128, "n": 1, "max_tokens": ENDLESS},
            "max_tokens",
        ),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": ENDLESS,
                "logprobs": True,
                "top_logprobs": 20,
            },
            "max_tokens",
        ),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "max_completion_tokens": ENDLESS,
                "n": 128,
            },
            "max_completion_tokens",
        ),
    ],
)
async def test_answer_that_may_be_too_large_is_refused_before_any_work(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    response = await server.http.post(f"/v1/{path}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", param)
    assert "67108864" in error["message"] and "EVERSTREAM_MAX_ANSWER_BYTES" in error["message"]
    assert (await server.stats()).prompt_tokens_total == 0


async def test_scores_have_the_same_bound() -> None:
    body: dict[str, Any] = {"prompt": "a", "continuations": [PROMPT], "top": 20}
    async with running(max_answer_bytes=1 << 20) as server:
        refused = await server.http.post("/v1/score", json=body)
        taken = await server.http.post("/v1/score", json={**body, "top": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top")
    assert taken.status_code == 200, taken.text


async def test_stream_of_any_length_is_not_refused(server: Running) -> None:
    """What is streamed is not held."""
    body = {"prompt": "a", "max_tokens": ENDLESS, "n": 2, "logprobs": 20, "stream": True}
    async with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_is_the_same_in_every_choice(server: Running, stream: bool) -> None:
    """It is written once for all of them."""
    body = {"prompt": PROMPT[:300], **EVERYTHING, "n": 3, "max_tokens": 2, "seed": 1}
    response = await server.generate(**body, stream=stream)
    prompts: dict[int, Any] = {}
    if stream:
        for chunk in sse.values_of(response.text, done=True):
            (choice,) = chunk["choices"]
            if "prompt_logprobs" in choice:
                prompts[choice["index"]] = choice
    else:
        prompts = {choice["index"]: choice for choice in response.json()["choices"]}
    assert sorted(prompts) == [0, 1, 2]
    for choice in prompts.values():
        assert len(choice["prompt_logprobs"]) == 300
        assert choice["prompt_logprobs"] == prompts[0]["prompt_logprobs"]
        assert choice["logprobs"]["tokens"][:300] == [chr(id) for id in PROMPT[:300]]
        assert choice["logprobs"]["text_offset"][:300] == list(range(300))


# The thread


async def test_event_loop_runs_while_a_large_answer_is_written() -> None:
    """Each part is waited for by the thread until the event loop has had a turn."""
    answers = LargeAnswers(1 << 30)
    loop, num_turns = asyncio.get_running_loop(), 0

    def turn() -> None:
        nonlocal num_turns
        num_turns += 1

    async def one_turn() -> None:
        turn()

    def parts() -> Iterator[bytes]:
        for index in range(20):
            asyncio.run_coroutine_threadsafe(one_turn(), loop).result(60)
            yield b"" if index % 2 else b"x"

    found = [part async for part in answers.parts(parts(), MAX_INLINE_BYTES + 1)]
    answers.close()
    assert found == [b"x"] * 10
    assert num_turns == 20


async def test_large_answers_take_turns() -> None:
    answers = LargeAnswers(1 << 30)
    order: list[str] = []

    def parts(name: str) -> Iterator[bytes]:
        for _ in range(3):
            order.append(name)
            yield b""

    async def write(name: str) -> None:
        async for _ in answers.parts(parts(name), MAX_INLINE_BYTES + 1):
            pass

    await asyncio.gather(write("a"), write("b"))
    answers.close()
    assert order == ["a", "b"] * 3


def test_all_answers_together_have_a_bound_and_each_tenant_its_share() -> None:
    answers = LargeAnswers(100)
    with answers.reserve("a", 100), answers.reserve("a", 100):
        with pytest.raises(RequestError) as refused, answers.reserve("a", 1):
            pass
        assert refused.value.code == "queue_full"
        others = answers.reserve("b", 100), answers.reserve("c", 100)
        with others[0], others[1], pytest.raises(RequestError), answers.reserve("d", 1):
            pass
        with answers.reserve("d", 1):
            pass
    with answers.reserve("a", 100 * AT_ONCE // 2):
        pass
    answers.close()
