"""How often the event loop asks the engine thread and the store thread for one operation."""

from __future__ import annotations

from typing import Any

import pytest

from server.engine.types import Event, TokenEvent
from server.runtime.async_engine import AsyncEngine
from server.runtime.queues import EventQueue
from server.sessions.loader import PAGE_EVENTS, Cursor
from server.sessions.sessions import Sessions
from tests.fakes import FakeEngine
from tests.server.failing_store import FailingStore
from tests.server.running_engine import begun, collect, driving, request, run
from tests.server.sessions.test_kept_sessions import keeping


def counted(async_engine: AsyncEngine) -> list[str]:
    """The threads that are asked from now on, in order."""
    asked: list[str] = []
    call, ask_store = async_engine.call, async_engine.ask_store

    async def counted_call(*args: Any, **more: Any) -> Any:
        asked.append("engine")
        return await call(*args, **more)

    async def counted_ask_store(*args: Any, **more: Any) -> Any:
        asked.append("store")
        return await ask_store(*args, **more)

    async_engine.call = counted_call  # type: ignore[method-assign]
    async_engine.ask_store = counted_ask_store  # type: ignore[method-assign]
    return asked


async def crashed(store: FailingStore, num_tokens: int) -> str:
    """A session that ran when its server ended, with at least so many tokens in the store."""
    async with driving(FakeEngine(), store=store) as async_engine:
        event_queue: EventQueue[Event] = EventQueue(10**6)
        await Sessions(async_engine).submit(request("r", 10**6, keep=True), event_queue)
        num_seen = 0
        while num_seen < num_tokens:
            num_seen += sum(isinstance(event, TokenEvent) for event in await event_queue.take())
    ((session, _),) = store.unfinished()
    return session


async def resumed(sessions: Sessions, session: str, after_seq: int) -> list[int]:
    event_queue: EventQueue[Event] = EventQueue(10**6)
    found = await sessions.resume(session, "me", Cursor(after_seq), "again", event_queue, False)
    assert found.reset is None
    pages = [page async for page in sessions.missed("me", found, "again")]
    seqs = [event.seq for page in pages for event in page]
    assert seqs == list(range(after_seq + 1, found.info.seq + 1))
    return seqs


async def test_resume_after_a_crash_takes_three_round_trips() -> None:
    store = FailingStore(durable=True)
    session = await crashed(store, 3)
    async with keeping(store=store) as (async_engine, sessions):
        seq = store.list("me", None, 1)[0].seq
        asked = counted(async_engine)
        assert await resumed(sessions, session, max(0, seq - PAGE_EVENTS + 1))
        assert asked == ["engine", "store", "engine"]


@pytest.mark.parametrize("num_pages", [2, 3])
async def test_each_further_page_of_missed_events_is_one_round_trip(num_pages: int) -> None:
    store = FailingStore(durable=True)
    session = await crashed(store, num_pages * PAGE_EVENTS)
    async with keeping(store=store) as (async_engine, sessions):
        seq = store.list("me", None, 1)[0].seq
        asked = counted(async_engine)
        await resumed(sessions, session, seq - num_pages * PAGE_EVENTS)
        assert asked == ["engine", "store", "engine", *["store"] * (num_pages - 1)]


async def test_resume_of_a_session_in_the_engine_takes_two_round_trips() -> None:
    async with keeping() as (async_engine, sessions):
        await run(sessions, request("r", 5, keep=True))
        (listed,) = await sessions.listed("me", None, 1)
        asked = counted(async_engine)
        assert await resumed(sessions, listed.id, 0)
        assert asked == ["engine", "store"]


async def test_request_on_an_evicted_session_takes_three_round_trips() -> None:
    engine = FakeEngine(max_sessions=1, can_evict=True)
    async with keeping(engine, FailingStore(durable=True)) as (async_engine, sessions):
        first = (await sessions.create("me")).session
        await sessions.create("me")
        asked = counted(async_engine)
        event_queue = await begun(sessions, request("r", 2, session=first))
        assert asked == ["engine", "store", "engine"]
        await collect(event_queue)
