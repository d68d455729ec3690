"""Server-sent events are parsed as the standard says, however they are cut into pieces."""

from __future__ import annotations

import pytest

from benchmarks.sse import SseEvent, SseParser, events_of, values_of

BODY = (
    b": comment\n\nid: a:1\nevent: token\ndata: {\xe2\x80\xa8}\n\n"
    b"data:first\r\ndata\r\ndata:  third\r\n\r\nid: lost\n\ndata: last\r\r: comment\n"
)
EVENTS = [SseEvent("{\u2028}", "a:1", "token"), SseEvent("first\n\n third"), SseEvent("last")]


@pytest.mark.parametrize("piece", [1, 2, 3, 1000])
def test_events_are_parsed_at_any_chunk_boundary(piece: int) -> None:
    parser = SseParser()
    pieces = (BODY[start : start + piece] for start in range(0, len(BODY), piece))
    assert [event for data in pieces for event in parser.feed(data)] == EVENTS
    assert parser.num_comments == 2


@pytest.mark.parametrize("body", ["date: 1\n\n", "data: 1\n\ndata: 2\n", "data: 1\n\nda"])
def test_unknown_field_or_incomplete_event_is_an_error(body: str) -> None:
    with pytest.raises(ValueError, match=r"not a field|incomplete"):
        events_of(body)


def test_end_of_a_stream_must_be_as_it_was_asked_for() -> None:
    assert values_of("data: 1\n\ndata: [DONE]\n\n", done=True) == [1]
    assert values_of("data: 1\n\n") == [1]
    for body, done in (("data: 1\n\n", True), ("data: [DONE]\n\n", False), ("", True)):
        with pytest.raises(ValueError, match=r"last event|Expecting value"):
            values_of(body, done)
