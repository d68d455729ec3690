"""Sessions that move between replicas, each with an async engine and a store of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from server.cluster.shared import PostgresHolding
from server.engine.types import Event, Failed, Finished, Migrated, TokenEvent
from server.errors import SessionAttached, SessionNotFound
from server.runtime.async_engine import AsyncEngine
from server.runtime.queues import EventQueue
from server.sessions.loader import Cursor
from server.sessions.sessions import IdempotencyKeys, KeyInUse, Sessions
from server.store.base import HeldElsewhere
from server.store.postgres.store import PostgresStore
from tests.fakes import STORY, FakeEngine
from tests.reliability.servers import STUCK_S
from tests.server.cluster.stores import fake_place
from tests.server.running_engine import driving, request, run


@dataclass
class Replica:
    async_engine: AsyncEngine
    sessions: Sessions
    keys: IdempotencyKeys
    store: PostgresStore
    engine: FakeEngine


@asynccontextmanager
async def replica(url: str, answer_s: float) -> AsyncIterator[Replica]:
    store = PostgresStore(fake_place(url))
    engine = FakeEngine(can_evict=True, new_id=lambda: f"sess_{secrets.token_hex(16)}")
    async with driving(engine, store=store) as async_engine:
        shared = PostgresHolding(async_engine, store, answer_s)
        sessions = Sessions(async_engine, holding=shared)
        keys = IdempotencyKeys(async_engine, sessions, shared)
        await sessions.start()
        yield Replica(async_engine, sessions, keys, store, engine)


@asynccontextmanager
async def replicas(
    url: str, number: int = 2, answer_s: float = STUCK_S
) -> AsyncIterator[list[Replica]]:
    """They answer, but on a busy machine perhaps not within seconds."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(replica(url, answer_s)) for _ in range(number)]


async def tokens(event_queue: EventQueue[Event], number: int) -> list[TokenEvent]:
    found: list[TokenEvent] = []
    while len(found) < number:
        found += [event for event in await event_queue.take() if isinstance(event, TokenEvent)]
    return found


async def last(event_queue: EventQueue[Event]) -> Event:
    while True:
        for event in await event_queue.take():
            if isinstance(event, Finished | Failed | Migrated):
                return event


async def begin(at: Replica, **more: object) -> tuple[str, EventQueue[Event]]:
    """A kept session that generates for a long time, after its first tokens."""
    event_queue: EventQueue[Event] = EventQueue(10**6)
    work = request("r", 10**6, keep=True, **more)
    await at.sessions.submit(work, event_queue)
    await tokens(event_queue, 3)
    (session,) = [one.id for one in await at.sessions.listed("me", None, 10)]
    return session, event_queue


async def resume(at: Replica, session: str, seq: int, take_over: bool = False) -> list[Event]:
    """All that is read after ``seq``, until some tokens of what runs have come too."""
    event_queue: EventQueue[Event] = EventQueue(10**6)
    resumed = await at.sessions.resume(session, "me", Cursor(seq), "again", event_queue, take_over)
    events: list[Event] = []
    async for page in at.sessions.missed("me", resumed, "again"):
        events += page
    if resumed.info.busy:
        at.async_engine.requests.caught_up("again")
        events += await tokens(event_queue, 5)
    at.async_engine.requests.release(event_queue)
    return events


def seqs(events: list[Event]) -> list[int]:
    return [event.seq for event in events if isinstance(event, TokenEvent)]


async def test_idle_session_moves_without_asking_its_holder(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        end = (await run(one.sessions, request("r", 5, keep=True)))[-1]
        assert isinstance(end, Finished)
        info = await other.sessions.info(end.session, "me")
        assert info.seq == end.seq
        with pytest.raises(SessionNotFound):
            await one.async_engine.call(lambda e, now: e.kept.info(end.session, "me", now))


async def test_detached_stream_continues_at_another_replica(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        session, event_queue = await begin(one)
        one.async_engine.requests.release(event_queue)
        events = await resume(other, session, 0)
        assert seqs(events) == list(range(1, len(events) + 1))
        text = "".join(event.text for event in events if isinstance(event, TokenEvent))
        assert text.strip("\ufffd") in STORY.decode() * 50


async def test_a_stream_with_a_reader_stays(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        session, event_queue = await begin(one)
        with pytest.raises(SessionAttached):
            await resume(other, session, 0)
        await tokens(event_queue, 3)


async def test_taking_over_cuts_the_reader_off(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        session, event_queue = await begin(one)
        events = await resume(other, session, 0, take_over=True)
        assert seqs(events) == list(range(1, len(events) + 1))
        end = await last(event_queue)
        assert isinstance(end, Failed)
        assert isinstance(end.error, SessionAttached)


async def test_only_one_of_two_gets_it(database_url: str) -> None:
    async with replicas(database_url, 3) as (one, *others):
        session, event_queue = await begin(one)
        one.async_engine.requests.release(event_queue)
        sinks = [EventQueue[Event](10**6) for _ in others]
        resumes = [
            at.sessions.resume(session, "me", Cursor(0), "again", sink, False)
            for at, sink in zip(others, sinks, strict=True)
        ]
        found = await asyncio.gather(*resumes, return_exceptions=True)
        lost = [each for each in found if isinstance(each, BaseException)]
        assert len(lost) == 1
        assert isinstance(lost[0], SessionAttached)


async def test_queries_about_a_stream_do_not_move_it(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        session, event_queue = await begin(one)
        info = await other.sessions.info(session, "me")
        assert info.busy
        assert info.seq >= 3
        await tokens(event_queue, 3)


async def test_cancel_moves_the_stream_and_ends_it(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        session, event_queue = await begin(one)
        await other.sessions.cancel(session, "me")
        assert isinstance(await last(event_queue), Migrated)
        async with asyncio.timeout(STUCK_S):
            while (await other.sessions.info(session, "me")).busy:
                pass


async def test_delete_reaches_a_session_of_another_replica(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        session, event_queue = await begin(one)
        await other.sessions.delete(session, "me")
        assert isinstance(await last(event_queue), Migrated)
        for at in (one, other):
            with pytest.raises(SessionNotFound):
                await at.sessions.info(session, "me")


async def test_another_s_session_is_not_found_anywhere(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        session, event_queue = await begin(one)
        with pytest.raises(SessionNotFound):
            await other.sessions.info(session, "she")
        with pytest.raises(SessionNotFound):
            await other.sessions.delete(session, "she")
        await tokens(event_queue, 3)


async def test_streams_of_a_drained_replica_continue_at_others(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        session, event_queue = await begin(one)
        await one.async_engine.retire()
        end = await last(event_queue)
        assert isinstance(end, Migrated)
        events = await resume(other, session, 0)
        assert seqs(events) == list(range(1, len(events) + 1))
        assert len(events) > end.seq


async def test_sessions_of_a_dead_replica_are_taken_on_request(database_url: str) -> None:
    """Its engine continues, but the lock that shows its life is gone, as after a kill."""
    async with replicas(database_url, answer_s=1.0) as (one, other):
        session, _ = await begin(one)
        assert one.store.presence is not None
        one.store.presence.close()
        async with asyncio.timeout(STUCK_S):
            while True:
                try:
                    events = await resume(other, session, 0)
                    break
                except (HeldElsewhere, SessionAttached):
                    continue
        assert seqs(events) == list(range(1, len(events) + 1))
        async with asyncio.timeout(STUCK_S):
            await one.async_engine.died.wait()


async def test_silent_replica_is_an_error_after_a_timeout(database_url: str) -> None:
    async with replicas(database_url, answer_s=1.0) as (one, other):
        session, event_queue = await begin(one)
        one.store.listen(lambda message: None, lambda key: None)
        with pytest.raises(HeldElsewhere):
            await other.sessions.cancel(session, "me")
        await tokens(event_queue, 3)


async def test_fork_and_rewind_take_an_idle_session(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        end = (await run(one.sessions, request("r", 20, keep=True)))[-1]
        assert isinstance(end, Finished)
        (copy,) = await other.sessions.fork(end.session, "me", 1, 10)
        assert copy.position == 10
        info = await one.sessions.rewind(end.session, "me", 5)
        assert info.position == 5
        assert info.epoch == 1


async def test_the_same_key_at_two_replicas_is_one_request(database_url: str) -> None:
    async with replicas(database_url) as both:
        sinks = [EventQueue[Event](10**6) for _ in both]
        begun = await asyncio.gather(
            *(
                at.keys.submit_once(request(f"r{i}", 5, keep=True, key="k"), sinks[i])
                for i, at in enumerate(both)
            ),
            return_exceptions=True,
        )
        first = [each for each in begun if each is None]
        assert len(first) == 1
        assert all(each is None or isinstance(each, KeyInUse) or each.session for each in begun)
        assert len(await both[0].sessions.listed("me", None, 10)) == 1
