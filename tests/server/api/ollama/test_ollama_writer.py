"""Lines of Ollama's answers, made of the engine's events without an engine."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from model.chat import TAGGED
from server.api.chat.prepare import PreparedChat
from server.api.ollama.routes import OllamaWriter
from server.engine.types import Event, Failed, Request, SamplingParams, TokenEvent
from server.errors import InternalFailure
from tests.server.api.openai.test_chat_writer import CALL, events_of


def writer(calls: Any = None, is_prompt: bool = False) -> OllamaWriter:
    """Each look at its clock takes a second."""
    request = Request("r", "me", (1,), SamplingParams(), keep=True)
    seconds = map(float, itertools.count(1))
    return OllamaWriter("m", PreparedChat(request, calls), is_prompt, seconds.__next__)


def lines_of(events: list[Event], **options: Any) -> list[dict[str, Any]]:
    made = writer(**options)
    written = b"".join(map(made.chunks, events)) + made.end()
    return [json.loads(line) for line in written.splitlines()]


def whole_of(events: list[Event], **options: Any) -> dict[str, Any]:
    made = writer(**options)
    for event in events:
        made.add(event)
    found: dict[str, Any] = json.loads(b"".join(made.whole()))
    return found


def test_token_without_text_makes_no_line() -> None:
    found = lines_of(events_of("", "a", "", "b", held="c"))
    assert [line["message"]["content"] for line in found] == ["a", "b", "c", ""]
    assert [line["done"] for line in found] == [False, False, False, True]


def test_calls_are_one_line_with_arguments_as_objects() -> None:
    text = f"{CALL}\n{CALL}"
    *_, called, last = lines_of(events_of(*text), calls=TAGGED)
    functions = [call["function"] for call in called["message"]["tool_calls"]]
    assert functions == [{"name": "look", "arguments": {"a": 1}}] * 2
    assert not called["done"] and last["done"] and last["done_reason"] == "stop"
    whole = whole_of(events_of(*text), calls=TAGGED)
    assert whole["message"]["tool_calls"] == called["message"]["tool_calls"]
    assert len({call["id"] for call in whole["message"]["tool_calls"]}) == 2


def test_call_that_was_cut_has_what_there_is_of_it() -> None:
    whole = whole_of(events_of(*CALL[: CALL.index("1")]), calls=TAGGED)
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert isinstance(call["function"]["arguments"], dict)


@pytest.mark.parametrize("is_prompt", [False, True])
def test_thinking_is_apart(is_prompt: bool) -> None:
    thought = TokenEvent("r", 1, 1, 65, "", -1.0, thought="hm")
    begun, answer, end = events_of("yes")
    found = lines_of([begun, thought, answer, end], is_prompt=is_prompt)
    said = found if is_prompt else [line["message"] for line in found]
    field = "response" if is_prompt else "content"
    assert [line.get("thinking") for line in said] == ["hm", None, None]
    assert [line[field] for line in said] == ["", "yes", ""]
    whole = whole_of([begun, thought, answer, end], is_prompt=is_prompt)
    whole = whole if is_prompt else whole["message"]
    assert (whole["thinking"], whole[field]) == ("hm", "yes")


def test_durations_are_those_of_the_clock() -> None:
    """Begun at 1 s, the first token at 2 s, the end at 3 s."""
    last = lines_of(events_of("a", "b"))[-1]
    names = ("total_duration", "prompt_eval_duration", "eval_duration")
    assert [last[name] for name in names] == [2 * 10**9, 10**9, 10**9]


def test_stream_that_cannot_be_finished_ends_with_an_error() -> None:
    begun, token, _ = events_of("a")
    *_, last = lines_of([begun, token, Failed("r", InternalFailure("lost"))])
    assert last["error"] == "lost"
