"""Chunks of a chat, made of the engine's events without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import sse
from model.chat import TAGGED
from server.api.openai.chat import ChatWriter
from server.api.openai.choices import TokenNames
from server.engine.types import Event, Finished, Request, SamplingParams, Started, TokenEvent, Usage
from tests.fakes import MODEL, ByteTokenizer

CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


def events_of(*texts: str, held: str = "") -> list[Event]:
    """What each token shows; ``held`` comes with the end."""
    size = len(texts)
    tokens = [TokenEvent("r", seq, seq, 65, text, -1.0) for seq, text in enumerate(texts, 1)]
    end = Finished("r", "s", size + 1, size, held, "stop", Usage(1, size), grammar_ended=True)
    return [Started("r", "s", 0), *tokens, end]


def choices_of(events: list[Event], **options: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """The SSE id and the choice of each chunk of a kept session's answer, without the first."""
    request = Request("r", "me", (1,), SamplingParams(), keep=True, start=False)
    writer = ChatWriter(request, MODEL, 0, **options)
    first, *others = sse.events_of(b"".join(map(writer.chunks, events)))
    assert first.value["choices"][0]["delta"]["role"] == "assistant"
    return [(event.id, event.value["choices"][0]) for event in others]


def test_token_without_text_makes_no_chunk() -> None:
    found = choices_of(events_of("", "a", "", "", "b", ""))
    assert [(id, choice["delta"]) for id, choice in found] == [
        ("-0:2", {"content": "a"}),
        ("-0:5", {"content": "b"}),
        ("-0:7", {}),
    ]


def test_call_begins_with_its_name() -> None:
    found = choices_of(events_of(*CALL), calls=TAGGED)
    deltas = [choice["delta"] for _, choice in found]
    assert deltas[0]["tool_calls"][0]["function"] == {"name": "look", "arguments": ""}
    rest = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[1:-1]]
    assert (all(rest), "".join(rest), deltas[-1]) == (True, '{"a": 1}', {})


@pytest.mark.parametrize("calls", [None, TAGGED])
def test_numbers_of_a_silent_token_come_with_the_next_text(calls: Any) -> None:
    names = TokenNames(ByteTokenizer())
    events = events_of("", "a", "", "", "b", "")
    found = choices_of(events, calls=calls, names=names, token_ids=True)
    assert [len(choice["token_ids"]) for _, choice in found] == [2, 3, 1]
    assert [len(choice["logprobs"]["content"]) for _, choice in found] == [2, 3, 1]
