from __future__ import annotations

from unittest.mock import Mock

from server.engine.types import Event, Failed, Finished, Migrated, TokenEvent, Usage
from server.errors import InternalFailure, SessionAttached
from server.observability.metrics import Metrics, Scrape, render
from server.runtime.commands import Absent, Command
from server.runtime.queues import CommandQueue, EventQueue
from server.runtime.readers import RequestRegistry, Sink


def token(request_id: str, seq: int = 1) -> TokenEvent:
    return TokenEvent(request_id, seq, seq, 5, "a")


def registry(
    metrics: Metrics | None = None, told: CommandQueue[Command] | None = None
) -> RequestRegistry:
    return RequestRegistry(metrics or Metrics(), lambda: 0.0, told or CommandQueue(0))


def finished(request_id: str) -> Finished:
    return Finished(request_id, None, 2, 2, "", "length", Usage(1, 1))


async def test_events_are_sorted_by_reader_in_order() -> None:
    readers, one, two = registry(), EventQueue[Event](9), EventQueue[Event](9)
    for request_id, sink in (("a", one), ("b", two), ("c", one)):
        readers.add(request_id, sink)
    batches: dict[Sink, list[Event]] = {}
    readers.sort([token("a"), token("b"), token("c")], 1.0, batches)
    readers.sort([finished("a"), token("b", 2), token("nobody")], 2.0, batches)
    assert batches == {
        one: [token("a"), token("c"), finished("a")],
        two: [token("b"), token("b", 2)],
    }


async def test_finished_request_is_live_no_more() -> None:
    readers, sink = registry(), EventQueue[Event](9)
    readers.add("a", sink)
    readers.add("b", sink)
    readers.sort([finished("a")], 1.0, {})
    assert "a" not in readers
    assert readers.requests(sink) == readers.requests() == ["b"]
    assert not readers.idle.is_set()
    readers.refuse("b", InternalFailure("refused"))
    assert readers.idle.is_set()


async def test_requests_of_a_reader_are_its_own() -> None:
    readers, one, two = registry(), EventQueue[Event](9), EventQueue[Event](9)
    readers.add("a", one)
    readers.add("b", two)
    assert readers.requests(two) == ["b"]


async def test_every_reader_sees_a_failure() -> None:
    readers, one, two = registry(), EventQueue[Event](9), EventQueue[Event](9)
    readers.add("a", one)
    readers.add("b", two)
    readers.fail_all(InternalFailure("the engine has stopped"))
    assert one.broken.done()
    assert two.broken.done()
    assert readers.idle.is_set()


async def test_tokens_of_one_step_share_the_time_since_the_last_one() -> None:
    metrics = Metrics()
    readers, sink = registry(metrics), EventQueue[Event](9)
    for request_id in ("a", "b"):
        readers.add(request_id, sink)
    readers.sort([token("a"), token("b")], 1.0, {})
    readers.sort([token("a", 2), token("a", 3), token("a", 4), token("b", 2)], 4.0, {})
    text = render([Scrape("m", metrics, [])], 0).decode()
    assert 'everstream_inter_token_seconds_count{model="m"} 4.0\n' in text
    assert 'everstream_inter_token_seconds_sum{model="m"} 6.0\n' in text
    assert 'everstream_inter_token_seconds_bucket{le="1.0",model="m"} 3.0\n' in text


async def test_each_token_is_counted_once_whichever_step_it_shares() -> None:
    metrics = Metrics()
    readers, sink = registry(metrics), EventQueue[Event](9)
    for request_id in ("a", "b"):
        readers.add(request_id, sink)
    readers.sort([token("a")], 0.5, {})
    readers.sort([token("a", 2), token("b")], 1.0, {})
    readers.sort([token("a", 3), token("b", 2)], 1.5, {})
    text = render([Scrape("m", metrics, [])], 0).decode()
    assert 'everstream_ttft_seconds_count{model="m"} 2.0\n' in text
    assert 'everstream_ttft_seconds_sum{model="m"} 1.5\n' in text
    assert 'everstream_inter_token_seconds_count{model="m"} 3.0\n' in text
    assert 'everstream_inter_token_seconds_sum{model="m"} 1.5\n' in text


async def test_events_of_a_reader_that_is_behind_are_held_back_in_order() -> None:
    readers, sink = registry(), EventQueue[Event](9)
    readers.add("a", sink, behind=True)
    readers.add("b", sink)
    batches: dict[Sink, list[Event]] = {}
    readers.sort([token("a"), token("b"), finished("a")], 1.0, batches)
    assert batches == {sink: [token("b")]}
    assert "a" in readers
    readers.caught_up("a")
    assert await sink.take() == [token("a"), finished("a")]
    assert "a" not in readers


async def test_only_a_reader_that_is_behind_can_catch_up_and_once() -> None:
    told: CommandQueue[Command] = CommandQueue(0)
    readers, sink = registry(told=told), EventQueue[Event](9)
    readers.add("a", sink)
    readers.caught_up("a")
    readers.caught_up("nobody")
    assert told.take(0) == []
    readers.add("b", sink, behind=True)
    readers.caught_up("b")
    assert len(told.take(0) or ()) == 1
    readers.caught_up("b")
    assert told.take(0) == []


def told_of(command: Command) -> str:
    """The method of the engine that it calls, and with what."""
    engine = Mock()
    command.call(engine, 0.0)
    (((name), (request_id,), _),) = engine.method_calls
    return f"{name} {request_id}"


def accepted(result: object) -> Command:
    return Command(lambda engine, now: None, request_ids=("a",), result=result)


async def test_request_held_while_its_session_is_loaded_is_parked_when_it_begins() -> None:
    told: CommandQueue[Command] = CommandQueue(0)
    readers, sink = registry(told=told), EventQueue[Event](9)
    readers.add("a", sink)
    readers.note(accepted(Absent.ABSENT))
    readers.hold(sink)  # the engine does not have it yet
    told.take(0)
    readers.note(accepted(Absent.ABSENT))
    assert told.take(0) == []
    readers.note(accepted(None))
    assert [told_of(command) for command in told.take(0) or ()] == ["park a"]
    readers.unhold(sink)
    assert [told_of(command) for command in told.take(0) or ()] == ["unpark a"]
    readers.note(accepted(None))
    assert told.take(0) == []


async def test_request_whose_reader_left_while_its_session_was_loaded_is_detached() -> None:
    told: CommandQueue[Command] = CommandQueue(0)
    readers, sink = registry(told=told), EventQueue[Event](9)
    readers.add("a", sink)
    readers.release(sink)
    told.take(0)
    readers.note(accepted(None))
    assert [told_of(command) for command in told.take(0) or ()] == ["detach a"]


async def test_failed_and_migrated_requests_are_live_no_more() -> None:
    readers, sink = registry(), EventQueue[Event](9)
    readers.add("a", sink)
    readers.add("b", sink)
    events: list[Event] = [Failed("a", SessionAttached()), Migrated("b", "s", 0, 4, 9)]
    batches: dict[Sink, list[Event]] = {}
    readers.sort(events, 1.0, batches)
    assert batches == {sink: events}
    assert readers.requests() == []
    assert readers.idle.is_set()


async def test_end_that_a_leaving_reader_has_not_seen_is_counted() -> None:
    metrics = Metrics()
    readers, sink = registry(metrics), EventQueue[Event](9)
    readers.add("a", sink, behind=True)
    readers.sort([finished("a")], 1.0, {})
    readers.release(sink)
    assert metrics.finished == {"length": 1}
