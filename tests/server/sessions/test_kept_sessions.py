"""Sessions in the engine and in the store alike, through all that can befall the store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from server.engine.session import Record
from server.engine.types import Event, Failed, Finished, Request, TokenEvent
from server.errors import InvalidRequest, RequestError, SessionNotFound
from server.runtime.async_engine import AsyncEngine
from server.runtime.commands import Absent
from server.runtime.queues import EventQueue
from server.sessions.loader import MAX_MOVES, PAGE_EVENTS, Cursor, Resumed
from server.sessions.sessions import Sessions
from server.store.base import (
    Fenced,
    Loaded,
    RecordRefused,
    SnapshotBroken,
    StoreError,
    StoreFailed,
    StoreFull,
)
from server.store.table_store import StoreLimits
from tests.fakes import STORY, FakeEngine
from tests.server.failing_store import FailingStore
from tests.server.running_engine import begun, collect, driving, request, run, settled, until

ANOTHER = "0" * 16
#: A log that reaches back no farther than this.
SHORT = StoreLimits(max_log_tokens=64)


@asynccontextmanager
async def keeping(
    engine: FakeEngine | None = None, store: FailingStore | None = None
) -> AsyncIterator[tuple[AsyncEngine, Sessions]]:
    async with driving(engine or FakeEngine(), store=store) as async_engine:
        yield async_engine, Sessions(async_engine)


def small(**more: Any) -> FakeEngine:
    """Room for one session; the others are in the store."""
    return FakeEngine(max_sessions=1, can_evict=True, **more)


async def until_failed(event_queue: EventQueue[Event]) -> tuple[list[int], RequestError]:
    """The numbers of the tokens that came, and what ended them."""
    seqs: list[int] = []
    while True:
        try:
            events = await event_queue.take()
        except RequestError as error:
            return seqs, error
        seqs += [event.seq for event in events if isinstance(event, TokenEvent)]
        if isinstance(events[-1], Failed):
            return seqs, events[-1].error


async def feed(sessions: Sessions, session: str, text: str) -> None:
    await run(sessions, Request("feed", "me", tuple(text.encode()), None, session=session))


async def shortened(async_engine: AsyncEngine) -> None:
    """Lets the store shorten its logs, which it does bit by bit."""
    while await async_engine.ask_store(lambda store: store.maintain(1e9)):
        pass


async def resume(sessions: Sessions, session: str, cursor: Cursor, **more: Any) -> Resumed:
    event_queue: EventQueue[Event] = more.pop("event_queue", None) or EventQueue(10**6)
    take_over = more.pop("take_over", False)
    return await sessions.resume(session, "me", cursor, "resumed", event_queue, take_over)


async def missed(sessions: Sessions, resumed: Resumed) -> list[TokenEvent | Finished]:
    pages = [page async for page in sessions.missed("me", resumed, "resumed")]
    assert all(0 < len(page) <= PAGE_EVENTS for page in pages)
    return [event for page in pages for event in page]


async def test_evicted_session_is_loaded_on_demand() -> None:
    store = FailingStore(durable=True)
    async with keeping(small(), store) as (async_engine, sessions):
        first = (await sessions.create("me")).session
        await feed(sessions, first, "hi")
        second = (await sessions.create("me")).session
        assert (await async_engine.stats()).evicted_sessions_total == 1
        events = await run(sessions, request(session=first, prompt="", max_tokens=4))
        story = bytes(event.token_id for event in events if isinstance(event, TokenEvent))
        assert story == STORY[2:6]
        assert (await sessions.info(second, "me")).position == 0
        assert (await sessions.info(first, "me")).position == 6


async def test_command_comes_with_the_session_that_was_loaded_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the session cannot leave in between, however many want the only place."""
    num_sent = 0
    async with keeping(small(), FailingStore(durable=True)) as (async_engine, sessions):
        first, call = (await sessions.create("me")).session, async_engine.call

        async def taken(*args: Any, **more: Any) -> Any:
            nonlocal num_sent
            num_sent += 1
            await call(lambda engine, now: engine.kept.create("me", now))
            return await call(*args, **more)

        monkeypatch.setattr(async_engine, "call", taken)
        assert (await sessions.info(first, "me")).position == 0
        assert num_sent == 2


async def test_session_evicted_before_each_try_is_an_error_with_try_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others bring it, and it has left again each time that this command is sent."""
    num_tries = 0

    async def absent(*args: Any, **more: Any) -> Absent:
        nonlocal num_tries
        num_tries += 1
        return Absent.ABSENT

    async with keeping(small(), FailingStore(durable=True)) as (async_engine, sessions):
        first = (await sessions.create("me")).session
        with monkeypatch.context() as patch:
            patch.setattr(async_engine, "call", absent)
            with pytest.raises(StoreFailed, match="try again"):
                await sessions.info(first, "me")
        assert num_tries == MAX_MOVES + 1


@pytest.mark.parametrize("num_left", [1, 3])
async def test_session_whose_callers_leave_while_it_is_loaded_is_restored(num_left: int) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Slow(FailingStore):
        def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
            begun.set()
            assert may_end.wait(60)
            return super().load(session, owner, at)

    async with keeping(small(), Slow(durable=True)) as (_, sessions):
        first = (await sessions.create("me")).session
        await sessions.create("me")
        asking = [asyncio.create_task(sessions.info(first, "me")) for _ in range(num_left)]
        assert await asyncio.to_thread(begun.wait, 60)
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)
        assert sessions.loader.is_loading(first, "me")
        may_end.set()
        await sessions.loader.ended(first, "me")
        assert await sessions.loader.is_here(first, "me")


async def test_resume_that_fails_because_of_another_session_leaves_no_reader() -> None:
    """To restore one session, another one is evicted, whose record the database refuses."""

    class Picky(FailingStore):
        refused = ""

        def commit(self, records: Sequence[Record]) -> None:
            if any(session == self.refused for session, _ in records):
                raise RecordRefused(ValueError("not this one"))
            super().commit(records)

    store = Picky(durable=True)
    async with keeping(small(max_detached_tokens=5), store) as (async_engine, sessions):
        sink = await begun(sessions, request("r", 10**6, keep=True))
        ((running, _),) = store.unfinished()
        async_engine.requests.release(sink)
        await until(async_engine, lambda stats: stats.num_parked == 1)
        store.refused = (await sessions.create("me")).session
        with pytest.raises(RecordRefused):
            await resume(sessions, running, Cursor(0))
        again: EventQueue[Event] = EventQueue(10**6)
        found = await sessions.resume(running, "me", Cursor(0), "again", again, False)
        assert found.info.busy


async def test_store_replaced_while_idle_is_an_explicit_reset() -> None:
    """The engine still has the session, and the store has never heard of it."""
    store = FailingStore(durable=True)
    async with keeping(store=store) as (async_engine, sessions):
        end = (await run(sessions, request(keep=True, max_tokens=4)))[-1]
        assert isinstance(end, Finished)
        cursor = Cursor(2, async_engine.epoch_name(0))
        store.replace()
        event_queue: EventQueue[Event] = EventQueue(10**6)
        lost = await resume(sessions, end.session, cursor, event_queue=event_queue)
        assert lost.reset is not None
        assert "another one" in lost.reset
        with pytest.raises(SessionNotFound):
            await async_engine.call(lambda e, now: e.kept.info(end.session, "me", now))


async def test_concurrent_commands_load_a_session_once() -> None:
    class Counting(FailingStore):
        num_loads = 0

        def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
            self.num_loads += 1
            return super().load(session, owner, at)

    store = Counting(durable=True)
    async with keeping(small(), store) as (_, sessions):
        first = (await sessions.create("me")).session
        await sessions.create("me")
        infos = await asyncio.gather(*(sessions.info(first, "me") for _ in range(20)))
        assert [info.session for info in infos] == [first] * 20
        assert store.num_loads == 1


async def test_evicted_session_is_not_found_by_another_owner() -> None:
    async with keeping(small(), FailingStore(durable=True)) as (_, sessions):
        first = (await sessions.create("me")).session
        await sessions.create("me")
        for call in (
            sessions.info(first, "you"),
            sessions.delete(first, "you"),
            sessions.fork(first, "you", 1, None),
            sessions.fork(first, "you", 1, 0),
            sessions.rewind(first, "you", 0),
            sessions.value(first, "you"),
            sessions.cancel(first, "you"),
            sessions.resume(first, "you", Cursor(0), "r", EventQueue(9), True),
        ):
            with pytest.raises(SessionNotFound):
                await call
        assert await sessions.listed("you", None, 9) == []
        assert (await sessions.info(first, "me")).session == first


async def test_fork_and_rewind_reach_back_into_the_past() -> None:
    async with keeping() as (_, sessions):
        session = (await sessions.create("me")).session
        await feed(sessions, session, "hello world")
        forks = await sessions.fork(session, "me", 2, 5)
        assert [fork.position for fork in forks] == [5, 5]
        assert len({session, *(fork.session for fork in forks)}) == 3
        (as_it_is,) = await sessions.fork(session, "me", 1, None)
        assert (as_it_is.position, as_it_is.seq, as_it_is.epoch) == (11, 0, 0)
        rewound = await sessions.rewind(session, "me", 3)
        assert (rewound.position, rewound.epoch) == (3, 1)
        for at in (-1, 4):
            with pytest.raises(InvalidRequest, match="at"):
                await sessions.rewind(session, "me", at)
        with pytest.raises(InvalidRequest, match="at"):
            await sessions.fork(session, "me", 1, 4)


async def test_missed_events_come_in_pages_up_to_the_present() -> None:
    async with keeping() as (_, sessions):
        num = 2 * PAGE_EVENTS + 3
        events = await run(sessions, request(max_tokens=num, keep=True))
        end = events[-1]
        assert isinstance(end, Finished)
        assert end.session is not None
        for last_seq in (0, 1, PAGE_EVENTS, num, num + 1):
            resumed = await resume(sessions, end.session, Cursor(last_seq))
            found = await missed(sessions, resumed)
            assert [event.seq for event in found] == list(range(last_seq + 1, num + 2))
            assert {event.request_id for event in found} <= {"resumed"}


async def test_cursor_of_another_history_is_a_reset() -> None:
    async with keeping() as (async_engine, sessions):
        end = (await run(sessions, request(max_tokens=3, keep=True)))[-1]
        assert isinstance(end, Finished)
        assert end.session is not None
        name = async_engine.epoch_name
        for cursor in (Cursor(5), Cursor(2, name(1)), Cursor(2, f"{ANOTHER}-0"), Cursor(0, "x")):
            resumed = await resume(sessions, end.session, cursor)
            assert resumed.reset
            assert (resumed.first_seq, await missed(sessions, resumed)) == (4, [])
        await sessions.rewind(end.session, "me", 2)
        assert (await resume(sessions, end.session, Cursor(2, name(0)))).reset
        assert (await resume(sessions, end.session, Cursor(2, name(1)))).reset is None


async def test_session_of_a_lost_store_is_a_reset_and_one_that_never_was_is_not() -> None:
    async with keeping() as (async_engine, sessions):
        lost = await resume(sessions, "sess_lost", Cursor(7, f"{ANOTHER}-0"))
        assert lost.reset
        assert (lost.info.busy, lost.info.seq, lost.info.position) == (False, 0, 0)
        for cursor in (Cursor(7), Cursor(0, async_engine.epoch_name(0))):
            with pytest.raises(SessionNotFound):
                await resume(sessions, "sess_lost", cursor)


async def test_log_that_does_not_reach_back_is_a_reset() -> None:
    async with keeping(store=FailingStore(limits=SHORT)) as (async_engine, sessions):
        end = (await run(sessions, request(max_tokens=200, keep=True)))[-1]
        assert isinstance(end, Finished)
        assert end.session is not None
        await run(sessions, request(max_tokens=20, session=end.session))
        await shortened(async_engine)
        assert (await resume(sessions, end.session, Cursor(0))).reset
        resumed = await resume(sessions, end.session, Cursor(210))
        assert [event.seq for event in await missed(sessions, resumed)] == list(range(211, 223))


async def test_unfinished_requests_continue_on_start_despite_a_broken_one() -> None:
    class PartlyBroken(FailingStore):
        broken = ""

        def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
            if session == self.broken:
                raise SnapshotBroken("altered")
            return super().load(session, owner, at)

    store = PartlyBroken(durable=True)
    async with keeping(store=store) as (async_engine, sessions):
        event_queue: EventQueue[Event] = EventQueue(10**6)
        for name in ("a", "b"):
            await sessions.submit(request(name, 10**6, keep=True), event_queue)
        await async_engine.retire()
    store.broken, whole = sorted(session for session, _ in store.unfinished())
    async with keeping(FakeEngine(max_detached_tokens=20), store) as (async_engine, sessions):
        before = (await sessions.info(whole, "me")).seq
        await sessions.continue_unfinished()
        await until(async_engine, lambda stats: stats.num_parked == 1)
        assert (await sessions.info(whole, "me")).seq == before + 20
        with pytest.raises(SnapshotBroken):
            await sessions.info(store.broken, "me")


async def test_nothing_of_a_failed_commit_is_seen_and_unkept_work_is_not_disturbed() -> None:
    store = FailingStore()
    async with keeping(store=store) as (async_engine, sessions):
        kept = await begun(sessions, request("kept", 10**6, keep=True))
        unkept = await begun(sessions, request("unkept", 2000))
        error = store.error = StoreFull("no room")
        assert [e.seq for e in await collect(unkept) if isinstance(e, TokenEvent)][-1] == 2000
        seen = await until_failed(kept)
        (listed,) = store.list("me", None, 9)
        assert seen == ([e.seq for e in store.read(listed.id, "me", 0, 10**6)], error)
        assert not async_engine.ready
        assert async_engine.healthy
        with pytest.raises(StoreFull) as caught:
            await sessions.submit(request("more", 3, keep=True), kept)
        assert caught.value is error
        for call in (sessions.create("me"), sessions.fork(listed.id, "me", 1, None)):
            with pytest.raises(StoreFull):
                await call


@pytest.mark.parametrize("error", [StoreFailed("a write failed"), RecordRefused("refused")])
async def test_request_that_ended_in_a_lost_commit_fails_for_its_reader(error: StoreError) -> None:
    class LosesEnds(FailingStore):
        def commit(self, records: Sequence[Record]) -> None:
            if any(isinstance(entry, Finished) for _, entry in records):
                raise error
            super().commit(records)

    async with keeping(store=LosesEnds()) as (async_engine, sessions):
        kept = await begun(sessions, request("kept", 10**6, keep=True))
        async_engine.requests.cancel("kept")
        async with asyncio.timeout(60):
            assert (await until_failed(kept))[1] is error
            await async_engine.drained()


async def test_command_whose_record_is_lost_gets_the_error() -> None:
    store = FailingStore()
    async with keeping(store=store) as (_, sessions):
        store.hold()
        creating = [asyncio.create_task(sessions.create("me")) for _ in range(3)]
        assert await asyncio.to_thread(store.held.wait, 60)
        store.error = StoreFailed("a write failed")
        store.unblock()
        outcomes = await asyncio.gather(*creating, return_exceptions=True)
        assert outcomes == [store.error] * 3
        assert store.list("me", None, 9) == []


async def test_sessions_continue_from_the_store_once_it_works_again() -> None:
    store = FailingStore()
    async with keeping(store=store) as (async_engine, sessions):
        kept = await begun(sessions, request("kept", 10**6, keep=True))
        first = await kept.take()
        store.error = StoreFailed("a write failed")
        seqs, _ = await until_failed(kept)
        last_seq = len([event for event in first if isinstance(event, TokenEvent)]) + len(seqs)
        store.error = None
        async with asyncio.timeout(60):
            while not async_engine.ready:
                await async_engine.stats()
        (listed,) = store.list("me", None, 9)
        event_queue: EventQueue[Event] = EventQueue(10**6)
        resumed = await resume(sessions, listed.id, Cursor(last_seq), event_queue=event_queue)
        assert (resumed.reset, resumed.info.busy) == (None, True)
        assert await missed(sessions, resumed) == []
        async_engine.requests.caught_up("resumed")
        event = (await event_queue.take())[0]
        assert isinstance(event, TokenEvent)
        assert event.seq == last_seq + 1
        assert event.token_id == STORY[event.position % len(STORY)]
        async_engine.requests.cancel("resumed")


async def test_server_whose_store_was_taken_sends_nothing_more_and_dies() -> None:
    store = FailingStore()
    async with driving(FakeEngine(), store=store) as async_engine:
        sessions = Sessions(async_engine)
        kept = await begun(sessions, request("kept", 10**6, keep=True))
        store.error = Fenced("another process has the store")
        async with asyncio.timeout(60):
            await async_engine.died.wait()
        with pytest.raises(Fenced):
            await sessions.create("me")
        seqs, error = await until_failed(kept)
        (listed,) = store.list("me", None, 9)
        assert isinstance(error, Fenced)
        assert len(seqs) <= listed.seq


async def test_retired_sessions_send_their_position_and_continue_in_the_next_server() -> None:
    store = FailingStore(durable=True)
    async with keeping(store=store) as (async_engine, sessions):
        event_queue = await begun(sessions, request("kept", 10**6, keep=True))
        async_engine.begin_drain()
        await async_engine.retire()
        async with asyncio.timeout(60):
            await async_engine.drained()
        events = await event_queue.take()
        (listed,) = store.list("me", None, 9)
        stats = await settled(async_engine)
        assert (stats.num_sessions, stats.held_slots) == (0, 0)
    last = events[-1]
    assert not isinstance(last, Finished | TokenEvent)
    assert getattr(last, "seq", None) == listed.seq
    async with keeping(store=store) as (async_engine, sessions):
        event_queue = EventQueue(10**6)
        resumed = await resume(sessions, listed.id, Cursor(listed.seq), event_queue=event_queue)
        assert resumed.info.busy
        async_engine.requests.caught_up("resumed")
        rest = await event_queue.take()
        async_engine.requests.cancel("resumed")
        rest += await collect(event_queue)
        seqs = [event.seq for event in rest if isinstance(event, TokenEvent | Finished)]
        assert seqs == [listed.seq + 1 + i for i in range(len(rest))]
        assert isinstance(rest[-1], Finished)
