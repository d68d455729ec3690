"""`cached_tokens` are those of the prompt that the prefix cache, or a session, had."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from benchmarks import sse
from tests.fakes import FakeEngine
from tests.server.api.openai.responding import asked, get
from tests.server.harness import Running, running

pytestmark = pytest.mark.process

PROMPT = "a" * 200
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
}
TWO = {"max_tokens": 2, "seed": 0}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(FakeEngine(max_prefixes=8)) as started:
        yield started


async def usage(server: Running, path: str, **more: Any) -> dict[str, Any]:
    answer = await server.http.post(path, json=PATHS[path] | TWO | more)
    assert answer.status_code == 200, answer.text
    whole = sse.values_of(answer.text, done=True)[-1] if more.get("stream") else answer.json()
    found: dict[str, Any] = whole["usage"]
    return found


def cached(usage: dict[str, Any]) -> int:
    number: int = usage["prompt_tokens_details"]["cached_tokens"]
    return number


@pytest.mark.parametrize(("path", "num_read"), [*zip(PATHS, (1, 2), strict=True)])
async def test_prompt_that_comes_again_is_cached_but_for_its_end(
    server: Running, path: str, num_read: int
) -> None:
    """The last token, or with messages what the template writes after them."""
    first = await usage(server, path)
    assert cached(first) == 0
    saved = (await server.stats()).prefix_saved_tokens_total
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for more in ({}, {"n": 2}, options):
        again = await usage(server, path, **more)
        assert again["prompt_tokens"] == first["prompt_tokens"]
        assert cached(again) == first["prompt_tokens"] - num_read
        stats = await server.stats()
        assert stats.prefix_saved_tokens_total - saved == cached(again)
        saved = stats.prefix_saved_tokens_total


async def test_prompts_of_a_list_are_counted_together(server: Running) -> None:
    both = await usage(server, "/v1/completions", prompt=[PROMPT, PROMPT + "b"])
    assert cached(both) in (0, 128, 199)  # the second may begin before the first has been read
    again = await usage(server, "/v1/completions", prompt=[PROMPT, PROMPT + "b"])
    assert cached(again) == 199 + 200


async def test_prompt_with_a_common_prefix_is_partly_cached(server: Running) -> None:
    await usage(server, "/v1/completions")
    other = await usage(server, "/v1/completions", prompt=PROMPT[:150] + "b" * 50)
    assert cached(other) == 128


async def test_response_counts_its_session_and_the_prefix_cache(server: Running) -> None:
    first, again = [await asked(server, input=PROMPT) for _ in range(2)]
    assert first["usage"]["input_tokens_details"]["cached_tokens"] == 0
    number = first["usage"]["input_tokens"]
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == number - len("\n\n")
    assert (await get(server, again["id"])).json()["usage"] == again["usage"]
    next = await asked(server, input="more", previous_response_id=first["id"])
    total = first["usage"]["total_tokens"]
    assert next["usage"]["input_tokens_details"]["cached_tokens"] == total
