"""Readers of the async engine that are slow, leave, come back, and take over from each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from server.engine.types import Event, Failed, Finished, SessionInfo, Started, TokenEvent
from server.errors import SessionAttached
from server.runtime.async_engine import AsyncEngine, Draining
from server.runtime.queues import EventQueue
from server.sessions.loader import Cursor
from server.sessions.sessions import Sessions
from tests.fakes import FakeEngine
from tests.server.harness import Gate
from tests.server.running_engine import (
    begun,
    collect,
    create,
    driving,
    info,
    request,
    settled,
    submit,
    until,
)
from tests.waiting import started_task


async def test_slow_reader_parks_only_its_requests_and_they_resume_in_place() -> None:
    async with driving(FakeEngine()) as async_engine:

        def press(full: bool) -> None:
            (async_engine.requests.hold if full else async_engine.requests.unhold)(slow)

        slow: EventQueue[Event] = EventQueue(200, press)

        quick: EventQueue[Event] = EventQueue(1000)
        await submit(async_engine, request("slow", 500), slow)
        await until(async_engine, lambda stats: stats.num_parked == 1)
        await submit(async_engine, request("quick", 100), quick)
        assert [e.seq for e in await collect(quick) if isinstance(e, TokenEvent)][-1] == 100
        assert (await async_engine.stats()).num_parked == 1
        events = await collect(slow)
    assert [e.seq for e in events if isinstance(e, TokenEvent)] == list(range(1, 501))


async def test_parked_request_is_cancelled_on_disconnect() -> None:
    async with driving(FakeEngine()) as async_engine:
        event_queue: EventQueue[Event] = EventQueue(
            200, lambda full: async_engine.requests.hold(event_queue)
        )
        await submit(async_engine, request(max_tokens=10**6), event_queue)
        await until(async_engine, lambda stats: stats.num_parked == 1)
        async_engine.requests.release(event_queue)
        stats = await settled(async_engine)
        assert (stats.held_slots, stats.num_parked) == (0, 0)


async def test_kept_session_continues_without_its_reader_up_to_the_limit() -> None:
    async with driving(FakeEngine(max_detached_tokens=30)) as async_engine:
        event_queue = await begun(async_engine, request(max_tokens=10**6, keep=True))
        (first, *_) = await event_queue.take()
        assert isinstance(first, Started)
        async_engine.requests.release(event_queue)
        await async_engine.drained()
        await until(async_engine, lambda stats: stats.num_parked == 1)
        found = await info(async_engine, first.session)
        assert found.busy
        assert found.parked
        total = (await async_engine.stats()).completion_tokens_total
        assert found.seq == total >= 30


async def test_request_left_while_its_reader_was_slow_stays_within_the_bound() -> None:
    async with driving(FakeEngine(max_detached_tokens=0)) as async_engine:
        event_queue: EventQueue[Event] = EventQueue(
            100, lambda full: async_engine.requests.hold(event_queue)
        )
        await submit(async_engine, request(max_tokens=10**6, keep=True), event_queue)
        await until(async_engine, lambda stats: stats.num_parked == 1)
        async_engine.requests.detach("r")
        stats = await settled(async_engine)
        await settled(async_engine)
        parked = await until(async_engine, lambda stats: stats.num_parked == 1)
        async_engine.requests.unhold(event_queue)
        await settled(async_engine)
        assert await settled(async_engine) == parked
        assert parked.completion_tokens_total <= stats.completion_tokens_total + 1


class Resuming:
    """An async engine whose engine runs a session without a reader."""

    def __init__(self, async_engine: AsyncEngine) -> None:
        self.async_engine = async_engine
        self.session = ""
        self.event_queue: EventQueue[Event] = EventQueue(10**6)

    async def begin(self, max_tokens: int = 10**6) -> None:
        left = await begun(self.async_engine, request("left", max_tokens, keep=True))
        first = (await left.take())[0]
        assert isinstance(first, Started)
        self.session = first.session
        self.async_engine.requests.release(left)

    async def attach(self, request_id: str = "new", take_over: bool = False) -> SessionInfo:
        found = await Sessions(self.async_engine).resume(
            self.session, "me", Cursor(0), request_id, self.event_queue, take_over
        )
        return found.info


@asynccontextmanager
async def left() -> AsyncIterator[tuple[AsyncEngine, Resuming]]:
    async with driving(FakeEngine()) as async_engine:
        resuming = Resuming(async_engine)
        await resuming.begin()
        yield async_engine, resuming


async def test_attached_session_is_paused_until_its_reader_has_caught_up() -> None:
    async with left() as (async_engine, resuming):
        attached = await resuming.attach()
        assert attached.busy
        assert attached.parked
        await settled(async_engine)
        assert (await info(async_engine, resuming.session)).seq == attached.seq
        async_engine.requests.caught_up("new")
        event = (await resuming.event_queue.take())[0]
        assert isinstance(event, TokenEvent)
        assert (event.request_id, event.seq) == ("new", attached.seq + 1)
        async_engine.requests.cancel("new")


async def test_finished_comes_after_missed_events() -> None:
    async with left() as (async_engine, resuming):
        attached = await resuming.attach()
        async_engine.requests.cancel("new")
        await settled(async_engine)
        resuming.event_queue.put([Started("missed", "s", 0)])  # what is read from the log
        async_engine.requests.caught_up("new")
        missed, end = await resuming.event_queue.take()
        assert missed.request_id == "missed"
        assert isinstance(end, Finished)
        assert (end.seq, end.finish_reason) == (attached.seq + 1, "cancelled")


async def test_end_of_backpressure_does_not_resume_a_reader_that_is_behind() -> None:
    async with left() as (async_engine, resuming):
        attached = await resuming.attach()
        async_engine.requests.hold(resuming.event_queue)
        async_engine.requests.unhold(resuming.event_queue)
        await settled(async_engine)
        assert (await info(async_engine, resuming.session)).seq == attached.seq
        async_engine.requests.hold(resuming.event_queue)
        async_engine.requests.caught_up("new")
        await settled(async_engine)
        assert (await info(async_engine, resuming.session)).seq == attached.seq
        async_engine.requests.unhold(resuming.event_queue)
        assert (await resuming.event_queue.take())[0].request_id == "new"
        async_engine.requests.cancel("new")


async def test_second_reader_is_refused_unless_it_takes_over() -> None:
    async with left() as (async_engine, resuming):
        await resuming.attach("first")
        async_engine.requests.caught_up("first")
        with pytest.raises(SessionAttached):
            await resuming.attach("second")
        old, resuming.event_queue = resuming.event_queue, EventQueue(10**6)
        await resuming.attach("second", take_over=True)
        while not isinstance(last := (await old.take())[-1], Failed):
            pass
        assert isinstance(last.error, SessionAttached)
        async_engine.requests.release(old)
        async_engine.requests.caught_up("second")
        assert (await resuming.event_queue.take())[0].request_id == "second"


async def test_cancel_and_a_take_over_at_once_end_the_session_for_its_new_reader() -> None:
    async with left() as (async_engine, resuming):
        await resuming.attach("first")
        async_engine.requests.cancel("first")
        await resuming.attach("second", take_over=True)
        async_engine.requests.caught_up("second")
        events = [e for e in await collect(resuming.event_queue) if e.request_id == "second"]
        assert isinstance(events[-1], Finished)
        assert events[-1].finish_reason == "cancelled"
        assert (await settled(async_engine)).num_running == 0
        assert async_engine.healthy


async def test_disconnect_before_attach_leaks_nothing() -> None:
    gate = Gate()
    async with driving(FakeEngine(before_step=gate), gate) as async_engine:
        resuming = Resuming(async_engine)
        beginning = asyncio.create_task(resuming.begin())
        gate.allow(2)
        await beginning
        attaching = await started_task(resuming.attach("first"))
        attaching.cancel()
        async_engine.requests.release(resuming.event_queue)
        gate.open()
        await asyncio.gather(attaching, return_exceptions=True)
        await settled(async_engine)
        async with asyncio.timeout(60):
            await async_engine.drained()
        assert (await resuming.attach("second")).busy


async def test_idle_session_has_nothing_to_attach_to() -> None:
    async with driving(FakeEngine()) as async_engine:
        resuming = Resuming(async_engine)
        resuming.session = (await create(async_engine)).session
        assert not (await resuming.attach()).busy
        async_engine.requests.caught_up("new")
        async with asyncio.timeout(60):
            await async_engine.drained()


async def test_resume_is_refused_by_a_server_that_drains() -> None:
    async with left() as (async_engine, resuming):
        async_engine.begin_drain()
        with pytest.raises(Draining):
            await resuming.attach()
