"""The events of a response from those of the engine: in order, and the same from any place on."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from model.chat import LISTED, PARAMETERS
from server.api.openai.responses.events import SILENT, ResponseWriter, on_stream, sse
from server.api.openai.responses.items import Note
from server.engine.types import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Migrated,
    Started,
    TokenEvent,
    Usage,
)
from server.errors import SessionAttached
from tests.fakes import ByteTokenizer

Json = dict[str, Any]

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def note(**more: Any) -> Note:
    return Note("resp_1", {"store": True, "tools": []}, [], **more)


def events_of(text: str, reason: FinishReason = "stop", held: str = "") -> list[Event]:
    """One token for each letter; ``held`` comes with the end."""
    size = len(text)
    return [
        Started("r", "sess_1", 3),
        *(
            TokenEvent("r", seq, 3 + seq, ord(letter), letter, -1.0, ((1, -0.5),))
            for seq, letter in enumerate(text, 1)
        ),
        Finished("r", "sess_1", size + 1, size + 4, held, reason, Usage(2, size)),
    ]


def written(events: list[Event], after: int = -1, **more: Any) -> list[Json]:
    writer = ResponseWriter(note(**more), ByteTokenizer(), after)
    return [json.loads(data) for event in events for data in writer.write(event)]


def kinds(events: list[Json]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "ab", CALL, f"{CALL}\n{CALL}", "<tool_call>", "a" + CALL])
@pytest.mark.parametrize("may_call", [False, True])
def test_any_part_of_the_events_is_that_of_the_whole(text: str, may_call: bool) -> None:
    events = events_of(text)
    whole = written(events, may_call=may_call, logprobs=True)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    for after in range(len(whole)):
        later = written(events, after, may_call=may_call, logprobs=True)
        assert later == whole[after + 1 :]


def test_call_is_an_item_with_its_own_events() -> None:
    events = written(events_of(CALL), may_call=True)
    assert kinds(events)[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds(events)[3:-3]) == {"function_call_arguments.delta"}
    assert kinds(events)[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    deltas = "".join(event["delta"] for event in events[3:-3])
    assert deltas == events[-3]["arguments"] == '{"a": 1}'
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "f", "completed")
    assert events[2]["item"] == {**item, "status": "in_progress", "arguments": ""}


def test_calls_of_one_answer_are_items_of_their_own() -> None:
    response = written(events_of(f"{CALL}\n{CALL}"), may_call=True)[-1]["response"]
    one, other = response["output"]
    assert one["id"] != other["id"]
    assert one["call_id"] != other["call_id"]
    assert (one["arguments"], one["status"]) == (other["arguments"], other["status"])


def test_call_that_is_cut_short_is_incomplete() -> None:
    cut = written(events_of(CALL[:45], "length"), may_call=True)
    assert cut[-1]["type"] == "response.incomplete"
    (item,) = cut[-1]["response"]["output"]
    assert item["status"] == "incomplete"


def test_text_that_only_looked_like_a_call_is_text() -> None:
    events = written(events_of("<tool_box>"), may_call=True)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "<tool_box>"


def test_withheld_text_comes_before_the_end() -> None:
    events = written(events_of("ab", held="c"))
    assert [e["delta"] for e in events if "delta" in e] == ["a", "b", "c"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "abc"


@pytest.mark.parametrize(
    ("reason", "kind", "status"),
    [
        ("stop", "completed", "completed"),
        ("length", "incomplete", "incomplete"),
        ("cancelled", "incomplete", "cancelled"),
        ("error", "failed", "failed"),
    ],
)
def test_end_has_its_reason(reason: FinishReason, kind: str, status: str) -> None:
    last = written(events_of("a", reason))[-1]
    assert last["type"] == f"response.{kind}"
    assert last["response"]["status"] == status
    assert (last["response"]["error"] is not None) == (reason == "error")
    expected = {"reason": "max_output_tokens"} if reason == "length" else None
    assert last["response"]["incomplete_details"] == expected


def test_lost_reader_gets_an_error_outside_the_sequence() -> None:
    writer = ResponseWriter(note(), ByteTokenizer())
    begun = writer.write(events_of("a")[0])
    for event in (Failed("r", SessionAttached()), Migrated("r", "sess_1", 0, 1, 4)):
        (data,) = writer.write(event)
        assert json.loads(data)["type"] == "error"
        assert json.loads(data)["sequence_number"] == len(begun)
    assert not writer.is_over


def test_events_are_framed_for_both_ways() -> None:
    data = b'{"type":"response.created","sequence_number":12}'
    assert sse(data) == b"id: 12\nevent: response.created\ndata: " + data + b"\n\n"
    error = b'{"type":"error","sequence_number":12}'
    assert sse(error) == b"event: error\ndata: " + error + b"\n\n"
    assert on_stream(data, None) == data
    assert json.loads(on_stream(data, 'a"b'))["stream_id"] == 'a"b'


@pytest.mark.parametrize("text", ["", "ab", CALL, "a" * 200, f"{CALL}\n{CALL}"])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_silent_writer_makes_no_event_and_the_same_response(
    text: str, reason: FinishReason
) -> None:
    told = ResponseWriter(note(may_call=True, logprobs=True), ByteTokenizer())
    silent = ResponseWriter(note(may_call=True, logprobs=True), ByteTokenizer(), SILENT)
    for event in events_of(text, reason):
        assert told.write(event)[:0] == silent.write(event)
    assert orjson.dumps(silent.response()) == orjson.dumps(told.response())


def test_log_probabilities_are_kept_as_json() -> None:
    """As dictionaries they would take many times the answer's bytes."""
    writer = ResponseWriter(note(logprobs=True), ByteTokenizer(), SILENT)
    for event in events_of("a" * 1000):
        writer.write(event)
    (item,) = writer.response()["output"]
    assert isinstance(item["content"][0]["logprobs"], orjson.Fragment)
    assert len(json.loads(orjson.dumps(item))["content"][0]["logprobs"]) == 1000


def test_texts_of_parameters_are_those_of_the_tools() -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    values = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    text = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    form = {"tools": [tool], "may_call": True, "call_form": PARAMETERS.name}
    events = written(events_of(text), **form)
    (call,) = events[-1]["response"]["output"]
    assert (call["name"], call["arguments"]) == ("f", '{"a": "1", "b": 2}')
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert "".join(deltas) == call["arguments"]


def test_calls_in_a_python_list_become_items() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    text = '<|tool_call_start|>[f(a="x)", b=[True, None]), f()]<|tool_call_end|>'
    form = {"tools": [tool], "may_call": True, "call_form": LISTED.name}
    events = written(events_of(text), **form)
    first, second = events[-1]["response"]["output"]
    assert (first["name"], first["arguments"]) == ("f", '{"a": "x)", "b": [true, null]}')
    assert (second["name"], second["arguments"], second["status"]) == ("f", "{}", "completed")
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert "".join(deltas) == first["arguments"] + second["arguments"]
