from __future__ import annotations

import json

import pytest

from clients.python.errors import (
    CapacityExhausted,
    ConnectionLost,
    InvalidRequest,
    ReaderTooSlow,
    SessionMigrated,
)
from clients.python.events import (
    Detached,
    Event,
    Finished,
    Migrate,
    Refused,
    Reset,
    Resumed,
    Token,
    Usage,
)
from clients.python.inboxes import Inboxes
from clients.python.request import Request


def request(request_id: str, kind: str = "generate", **more: bool) -> Request:
    return Request(request_id, kind, b"{}", **more)


def token(request_id: str, seq: int) -> Token:
    return Token(request_id, seq, position=seq, token_id=0, text="")


def end(request_id: str, seq: int = 1) -> Finished:
    return Finished(request_id, None, seq, 1, "", "length", Usage(1, 1, 2))


def resumed(seq: int, last_seq: int, busy: bool) -> Resumed:
    return Resumed("a", "s", "store-0", seq, last_seq, 50, busy)


def read_again(*events: Event, follows: bool = True) -> tuple[int, Inboxes]:
    """How many of ``events`` are taken before the request is over."""
    inboxes = Inboxes()
    inboxes.open(request("a", "resume" if follows else "generate"))
    for event in events:
        inboxes.deliver(event)
    return len(inboxes.take("a")), inboxes


def opened(*request_ids: str, max_unread: int = 8) -> Inboxes:
    inboxes = Inboxes(max_unread)
    for request_id in request_ids:
        inboxes.open(request(request_id))
    return inboxes


def test_each_request_gets_its_own_events_in_order() -> None:
    inboxes = opened("a", "b")
    events: list[Event] = [token("a", 1), token("b", 1), token("a", 2)]
    for event in events:
        inboxes.deliver(event)
    assert inboxes.take("a") == [events[0], events[2]]
    assert inboxes.take("a") == []
    assert inboxes.take("b") == [events[1]]


def test_last_event_closes_the_request() -> None:
    inboxes = opened("a")
    inboxes.deliver(end("a"))
    assert inboxes.is_open("a")
    assert inboxes.take("a") == [end("a")]
    assert not inboxes.is_open("a")


def test_arrival_and_failure_wake_the_reader() -> None:
    inboxes, woken = Inboxes(), list[str]()
    inboxes.open(request("a"), lambda: woken.append("a"))
    inboxes.open(request("b"), lambda: woken.append("b"))
    inboxes.deliver(token("b", 1))
    assert woken == ["b"]
    inboxes.fail(ConnectionLost("gone"))
    assert woken == ["b", "a", "b"]


def test_failure_comes_after_what_had_arrived_and_reaches_everyone() -> None:
    inboxes = opened("a", "b")
    inboxes.deliver(token("a", 1))
    inboxes.fail(ConnectionLost("gone"))
    assert inboxes.take("a") == [token("a", 1)]
    for request_id in "ab":
        with pytest.raises(ConnectionLost, match="gone"):
            inboxes.take(request_id)
        assert not inboxes.is_open(request_id)


def test_unread_events_are_bounded_and_harm_no_other_request() -> None:
    inboxes = opened("slow", "other", max_unread=3)
    for seq in range(1, 6):
        inboxes.deliver(token("slow", seq))
    inboxes.deliver(token("other", 1))
    assert list(inboxes.end_messages) == [("detach", "slow")]
    assert inboxes.take("slow") == [token("slow", seq) for seq in (1, 2, 3)]
    with pytest.raises(ReaderTooSlow):
        inboxes.take("slow")
    assert inboxes.take("other") == [token("other", 1)]


def test_full_inbox_still_takes_the_end() -> None:
    inboxes = opened("a", max_unread=1)
    inboxes.deliver(token("a", 1))
    inboxes.deliver(end("a"))
    assert inboxes.take("a") == [token("a", 1), end("a")]


def test_abandoned_request_is_to_be_cancelled_once_and_its_events_dropped() -> None:
    inboxes = opened("a")
    inboxes.abandon("a")
    inboxes.abandon("a")
    inboxes.deliver(token("a", 1))
    assert list(inboxes.end_messages) == [("cancel", "a")]
    assert not inboxes.is_open("a")


def test_request_that_has_ended_needs_no_cancel() -> None:
    inboxes = opened("a")
    inboxes.fail(ConnectionLost("gone"))
    inboxes.abandon("a")
    assert not inboxes.end_messages


def test_refusal_of_an_unreadable_frame_fails_all_requests() -> None:
    inboxes = opened("a", "b")
    inboxes.deliver(Refused(None, InvalidRequest("not JSON")))
    assert sorted(inboxes.end_messages) == [("cancel", "a"), ("cancel", "b")]
    for request_id in "ab":
        with pytest.raises(InvalidRequest):
            inboxes.take(request_id)


def test_idle_session_without_missed_events_ends_at_once() -> None:
    num_taken, inboxes = read_again(resumed(7, 7, busy=False), token("a", 8))
    assert (num_taken, inboxes.is_open("a")) == (1, False)


def test_idle_session_ends_with_the_last_event_of_its_log() -> None:
    events = [resumed(1, 5, busy=False), token("a", 2), end("a", 3), token("a", 4), end("a", 5)]
    num_taken, inboxes = read_again(*events, token("a", 6))
    assert (num_taken, inboxes.is_open("a")) == (5, False)


def test_busy_session_ends_with_what_it_runs() -> None:
    events = [resumed(1, 3, busy=True), end("a", 2), token("a", 3), token("a", 4), end("a", 5)]
    for num in (3, 4):
        assert read_again(*events[:num])[1].is_open("a")
    num_taken, inboxes = read_again(*events, token("a", 6))
    assert (num_taken, inboxes.is_open("a")) == (5, False)
    assert not inboxes.end_messages


@pytest.mark.parametrize(
    "last", [Detached("a"), Migrate("a", "s", "store-0", 3, 9), Refused("a", ConnectionLost("x"))]
)
def test_busy_session_ends_with_its_attachment(last: Event) -> None:
    num_taken, inboxes = read_again(resumed(1, 3, busy=True), token("a", 2), last, token("a", 3))
    assert (num_taken, inboxes.is_open("a")) == (3, False)


def test_generation_that_is_repeated_ends_with_its_own_end() -> None:
    events = [resumed(1, 5, busy=True), token("a", 2), end("a", 3), token("a", 4), end("a", 6)]
    num_taken, inboxes = read_again(*events, follows=False)
    assert (num_taken, inboxes.is_open("a")) == (3, False)
    assert list(inboxes.end_messages) == [("detach", "a")]  # what runs now is somebody else's


def test_reset_leaves_what_runs_alone() -> None:
    reset = Reset("a", "s", "store-1", 5, 5, 50, busy=True, reason="rewound")
    num_taken, inboxes = read_again(reset, token("a", 6))
    assert (num_taken, inboxes.is_open("a")) == (1, False)
    assert list(inboxes.end_messages) == [("detach", "a")]


def test_request_whose_end_is_unread_needs_no_cancel() -> None:
    inboxes = opened("a")
    inboxes.deliver(end("a"))
    inboxes.abandon("a")
    assert not inboxes.end_messages


LOST = ConnectionLost("the connection ended")


def begun(is_kept: bool, kind: str = "resume") -> Inboxes:
    """One request that has had two events of a session."""
    inboxes = Inboxes()
    inboxes.open(request("a", kind, is_kept=is_kept))
    inboxes.deliver(resumed(5, 5, busy=True))
    inboxes.deliver(token("a", 6))
    return inboxes


def test_kept_request_is_resumed_after_its_last_event() -> None:
    inboxes = begun(is_kept=True)
    inboxes.lose(LOST, for_good=False)
    ((inbox, error),) = inboxes.lost
    message = json.loads(inbox.again())
    assert (message["type"], message["last_seq"], message["epoch"]) == ("resume", 6, "store-0")
    assert error is LOST
    inboxes.deliver(resumed(6, 8, busy=False))
    for event in (token("a", 6), token("a", 7), end("a", 8)):
        inboxes.deliver(event)
    read = [resumed(5, 5, busy=True), token("a", 6), token("a", 7), end("a", 8)]
    assert inboxes.take("a") == read
    assert not inboxes.is_open("a")


@pytest.mark.parametrize(("is_kept", "for_good"), [(False, False), (True, True)])
def test_unrecoverable_request_fails_after_the_received_events(
    is_kept: bool, for_good: bool
) -> None:
    inboxes = begun(is_kept, "generate")
    inboxes.lose(LOST, for_good)
    assert not inboxes.lost
    assert len(inboxes.take("a")) == 2
    with pytest.raises(ConnectionLost, match="the connection ended; "):
        inboxes.take("a")


def test_migrate_is_followed_transparently() -> None:
    inboxes = begun(is_kept=True)
    inboxes.deliver(Migrate("a", "s", "store-0", 6, 12))
    ((inbox, error),) = inboxes.lost
    assert isinstance(error, SessionMigrated)
    assert inboxes.is_wanted(inbox)
    assert len(inboxes.take("a")) == 2


@pytest.mark.parametrize(
    ("code", "is_repeatable", "goes_on"),
    [
        ("draining", True, True),
        ("store_taken", True, True),
        ("store_taken", False, False),
        ("draining", False, True),
        ("queue_full", True, False),
    ],
)
def test_refusal_by_a_leaving_server_is_retried_on_another(
    code: str, is_repeatable: bool, goes_on: bool
) -> None:
    """It has done nothing."""
    inboxes = Inboxes()
    inboxes.open(request("a", is_repeatable=is_repeatable))
    inboxes.deliver(Refused("a", CapacityExhausted("no", code)))
    assert [inbox.request.request_id for inbox, _ in inboxes.lost] == ["a"] * goes_on
    assert len(inboxes.take("a")) == (not goes_on)


def test_refused_request_is_retried_after_its_connection_closes() -> None:
    """A server that drains refuses first, and closes then: nothing is in flight."""
    inboxes = Inboxes()
    inboxes.open(request("a", is_repeatable=False))
    inboxes.deliver(Refused("a", CapacityExhausted("no", "draining")))
    ((inbox, _),) = inboxes.lost
    inbox.is_being_recovered = True
    inboxes.lose(LOST, for_good=False)
    assert inboxes.is_wanted(inbox)
    assert inboxes.take("a") == []


def test_abandoned_request_is_not_resumed() -> None:
    inboxes = begun(is_kept=True)
    inboxes.lose(LOST, for_good=False)
    ((inbox, _),) = inboxes.lost
    inbox.is_being_recovered = True
    inboxes.abandon("a")
    assert not inboxes.is_wanted(inbox)
    assert not inboxes.end_messages
