"""Thinking in Anthropic's blocks: only where it is asked for, within a budget, shown or not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api.anthropic.talking import ask, collected, events_of
from tests.server.api.openai.thinking import (
    ANSWER,
    ASKED,
    NUM_SAID,
    NUM_THOUGHT,
    OFF,
    THOUGHT,
    thinking_server,
)

pytestmark = pytest.mark.process

ON: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}


async def told(stream: bool, thinking: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    async with thinking_server(**settings) as server:
        answer = await ask(server, max_tokens=200, stream=stream, thinking=thinking)
    return collected(events_of(answer)) if stream else answer.json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [ON, {"type": "adaptive"}])
async def test_thinking_is_a_block_before_the_text(stream: bool, thinking: dict[str, Any]) -> None:
    found = await told(stream, thinking)
    thought, text = found["content"]
    assert thought == {"type": "thinking", "thinking": THOUGHT, "signature": "everstream"}
    assert text == {"type": "text", "text": ANSWER}
    assert found["stop_reason"] == "end_turn"
    assert found["usage"]["output_tokens"] == NUM_SAID
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": NUM_THOUGHT}


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_that_is_not_shown_is_an_empty_block(stream: bool) -> None:
    found = await told(stream, {**ON, "display": "omitted"})
    thought, text = found["content"]
    assert (thought["thinking"], text["text"]) == ("", ANSWER)
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": NUM_THOUGHT}


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
async def test_answer_has_no_thinking_unless_it_is_asked_for(
    thinking: dict[str, Any] | None,
) -> None:
    """Also where the server's own clients get it by default."""
    text = ">\nHello!\n\nUser: and"
    found = await told(False, thinking, text=text, after=ASKED + OFF, reasoning="on")
    assert found["content"] == [{"type": "text", "text": "Hello!"}]


async def test_budget_ends_the_thinking() -> None:
    found = await told(False, {"type": "enabled", "budget_tokens": 6})
    thought, *_ = found["content"]
    assert len(thought["thinking"]) <= 6
    assert THOUGHT.startswith(thought["thinking"].strip())


async def test_effort_is_for_models_with_levels() -> None:
    async with thinking_server() as server:
        answer = await ask(server, max_tokens=9, thinking=ON, output_config={"effort": "max"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-everstream-ignored"] == "output_config.effort"
