"""Responses with log-probabilities: what making one, and reading one again, may cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from server.api.openai.responses import stored as responses_reading
from server.models.service import LargeAnswers
from tests.fakes import FakeEngine
from tests.server.api.openai.responding import ask, asked, create, get, socket_of, until_end
from tests.server.harness import Gate, Running, running

LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
TOO_LARGE = {**LOGPROBS, "max_output_tokens": 1_000_000}


@pytest.mark.parametrize("stream", [False, True])
async def test_response_that_may_be_too_large_is_refused(server: Running, stream: bool) -> None:
    refused = await ask(server, **TOO_LARGE, stream=stream)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "max_output_tokens")
    assert "EVERSTREAM_MAX_ANSWER_BYTES" in error["message"]
    assert (await server.stats()).num_sessions == 0


async def test_socket_has_the_same_bound(server: Running) -> None:
    async with socket_of(server) as socket:
        await create(socket, **TOO_LARGE)
        (error,) = await until_end(socket)
    assert error["error"]["param"] == "max_output_tokens"


@pytest.mark.parametrize("query", [{}, {"stream": "true"}])
async def test_other_requests_are_answered_while_a_response_is_read_again(
    server: Running, monkeypatch: pytest.MonkeyPatch, query: dict[str, str]
) -> None:
    """What writes the response waits for the answer to the other request."""
    response = await asked(server, **LOGPROBS, max_output_tokens=600, ignore_eos=True)
    answered = threading.Event()
    run = LargeAnswers.run

    async def waiting(answers: LargeAnswers, call: Callable[[], Any]) -> Any:
        def after_the_other() -> Any:
            assert answered.wait(30)
            return call()

        return await run(answers, after_the_other)

    monkeypatch.setattr(LargeAnswers, "run", waiting)
    reading = asyncio.create_task(get(server, response["id"], **query))
    assert (await server.generate(prompt="a", max_tokens=1)).status_code == 200
    assert not reading.done()
    answered.set()
    again = await reading
    assert again.status_code == 200
    if not query:
        assert again.json()["output"] == response["output"]
        assert len(response["output"][0]["content"][0]["logprobs"]) == 600


async def test_each_page_is_written_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading again costs as much for each token, however many there are."""
    sizes: list[int] = []
    write_all = responses_reading._write_all

    def counting(writer: Any, events: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        sizes.append(len(events))
        write_all(writer, events)

    monkeypatch.setattr(responses_reading, "_write_all", counting)
    response = await asked(server, **LOGPROBS, max_output_tokens=1500, ignore_eos=True)
    assert (await get(server, response["id"])).json()["output"] == response["output"]
    assert sum(sizes) == 1501


async def test_large_responses_that_are_made_at_once_are_bounded() -> None:
    gate = Gate()
    body = {**LOGPROBS, "max_output_tokens": 600, "ignore_eos": True}
    async with running(FakeEngine(before_step=gate), max_answer_bytes=1 << 20) as server:
        ends = asyncio.as_completed([ask(server, **body) for _ in range(4)])
        refused = [await next(ends), await next(ends)]
        gate.open()
        made = [await end for end in ends]
    assert [answer.json()["error"]["code"] for answer in refused] == ["queue_full"] * 2
    assert [answer.status_code for answer in made] == [200, 200]
