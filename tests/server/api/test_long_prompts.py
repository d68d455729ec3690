"""A prompt is as long as a body may be; what it costs others does not depend on its length."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks import sse
from tests.server.served import ENDLESS, served
from tests.tiny import write_model

pytestmark = pytest.mark.process

NUM_TOKENS = 200_000
#: Tokens of prompts in one step, of which each gives the other stream one of its own.
PER_STEP = 128


@pytest.mark.timeout(600)
@pytest.mark.parametrize("keep", [False, True])
async def test_other_streams_continue_while_a_long_prompt_is_read(
    tmp_path: Path, keep: bool
) -> None:
    folder = write_model(tmp_path / "m")
    async with served(f"m={folder}", store="memory", prefix_cache=0) as server:
        body = {**ENDLESS, "prompt": "Once", "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body) as other:
            events = sse.read(other.aiter_bytes())
            await anext(events)
            reading = asyncio.create_task(
                server.complete([7] * NUM_TOKENS, max_tokens=1, keep=keep)
            )
            num_events = 0
            async for event in events:
                assert "error" not in event.value
                num_events += 1
                if reading.done():
                    break
    usage = reading.result()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_TOKENS, 1)
    assert num_events >= NUM_TOKENS // PER_STEP


async def test_prompt_that_is_cancelled_while_it_is_read_leaves_nothing(tmp_path: Path) -> None:
    async with served(f"m={write_model(tmp_path / 'm')}", store="memory") as server:
        body = {"prompt": [7] * NUM_TOKENS, "keep": True, "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body) as answer:
            first = await anext(sse.read(answer.aiter_bytes()))
            session = first.value["session"]
        deleted = await server.http.delete(f"/v1/sessions/{session}")
        assert deleted.status_code in (200, 204), deleted.text
        assert await server.text() != ""
