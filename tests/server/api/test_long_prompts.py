"""A prompt is as long as a body may be; what it costs others does not depend on its length."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.server.served import ENDLESS, served, write_model

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
            lines = other.aiter_lines()
            await anext(lines)
            reading = asyncio.create_task(
                server.complete([7] * NUM_TOKENS, max_tokens=1, keep=keep)
            )
            num_events = 0
            async for line in lines:
                num_events += line.startswith("data: {")
                if reading.done():
                    break
            last = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
    assert "error" not in last
    usage = reading.result()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_TOKENS, 1)
    assert num_events >= NUM_TOKENS // PER_STEP


async def test_prompt_that_is_cancelled_while_it_is_read_leaves_nothing(tmp_path: Path) -> None:
    async with served(f"m={write_model(tmp_path / 'm')}", store="memory") as server:
        body = {"prompt": [7] * NUM_TOKENS, "keep": True, "stream": True}
        async with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            line = await anext(lines)
            while not line.startswith("data: {"):
                line = await anext(lines)
            session = json.loads(line.removeprefix("data: "))["session"]
        deleted = await server.http.delete(f"/v1/sessions/{session}")
        assert deleted.status_code in (200, 204), deleted.text
        assert await server.text() != ""
