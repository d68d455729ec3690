"""Work under an idempotency key: done once, and read again."""

from __future__ import annotations

import asyncio

import pytest

from server.engine.types import Event, Finished, Request
from server.errors import SessionAttached
from server.runtime.queues import EventQueue
from server.sessions.sessions import IdempotencyKeys, KeyInUse
from server.store.base import HistoryGone
from tests.server.failing_store import FailingStore
from tests.server.running_engine import begun, collect, request, run
from tests.server.sessions.test_kept_sessions import SHORT, keeping, shortened


async def test_key_in_use_is_refused_and_then_the_work_is_found() -> None:
    store = FailingStore()
    async with keeping(store=store) as (async_engine, sessions):
        keys = IdempotencyKeys(async_engine, sessions)
        event_queue: EventQueue[Event] = EventQueue(10**6)
        store.hold()
        first = asyncio.create_task(
            keys.submit_once(request("a", 3, keep=True, key="k"), event_queue)
        )
        assert await asyncio.to_thread(store.held.wait, 60)
        with pytest.raises(KeyInUse):
            await keys.submit_once(request("b", 3, keep=True, key="k"), event_queue)
        store.unblock()
        assert await first is None
        events = await collect(event_queue)
        found = await keys.submit_once(request("b", 3, keep=True, key="k"), event_queue)
        assert found is not None
        assert found.finished == events[-1]
        other = Request("c", "you", (1,), None, keep=True, key="k")
        assert await keys.submit_once(other, EventQueue(9)) is None
        assert (await async_engine.stats()).num_sessions == 2


async def test_work_under_a_key_is_read_again_without_later_events() -> None:
    async with keeping() as (async_engine, sessions):
        keys = IdempotencyKeys(async_engine, sessions)
        end = (await run(sessions, request("a", 3, keep=True, key="k")))[-1]
        assert isinstance(end, Finished)
        assert end.session is not None
        busy = await begun(sessions, request("b", 10**6, session=end.session))
        found = await keys.find("me", "k")
        assert found is not None
        again = await keys.resume("me", found, "c", EventQueue(9))
        events = [e async for page in sessions.missed("me", again, "c") for e in page]
        assert [event.seq for event in events] == [1, 2, 3, 4]
        assert not again.info.busy
        assert async_engine.healthy
        assert (await sessions.info(end.session, "me")).busy
        async_engine.requests.release(busy)


async def test_work_under_a_key_that_has_another_reader_is_not_taken_from_it() -> None:
    async with keeping() as (async_engine, sessions):
        keys = IdempotencyKeys(async_engine, sessions)
        event_queue: EventQueue[Event] = EventQueue(10**6)
        await keys.submit_once(request("a", 10**6, keep=True, key="k"), event_queue)
        found = await keys.find("me", "k")
        assert found is not None
        with pytest.raises(SessionAttached):
            await keys.resume("me", found, "b", EventQueue(9))
        async_engine.requests.release(event_queue)


async def test_work_under_a_key_without_a_log_is_an_error() -> None:
    async with keeping(store=FailingStore(limits=SHORT)) as (async_engine, sessions):
        keys = IdempotencyKeys(async_engine, sessions)
        await run(sessions, request("a", 200, keep=True, key="k"))
        await shortened(async_engine)
        found = await keys.find("me", "k")
        assert found is not None
        with pytest.raises(HistoryGone):
            await keys.resume("me", found, "b", EventQueue(9))
