"""The table of stages: every transition is taken by real sessions, and no other one is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from threading import Event as Signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.engine import Engine
from server.engine.session import TRANSITIONS, SessionEvent, Stage
from server.engine.types import Event
from server.errors import RequestError
from server.runtime.async_engine import AsyncEngine
from server.runtime.queues import EventQueue
from server.sessions.loader import MAX_MOVES, Cursor, Handover, Held
from server.sessions.sessions import Sessions
from server.store.base import HeldElsewhere, Loaded, StoreFailed
from tests.fakes import FakeEngine
from tests.server.failing_store import FailingStore
from tests.server.running_engine import driving, request

#: One after the other they take every row of the table.
EVERY_TRANSITION = (
    *("LOAD", "FAIL", "LOAD", "HELD_ELSEWHERE", "FAIL", "OPEN", "BEGIN", "PARK", "UNPARK"),
    *("FINISH", "BEGIN", "PARK", "FINISH", "EVICT", "LOAD", "RESTORE", "BEGIN", "PARK"),
    *("EVICT", "LOAD", "HELD_ELSEWHERE", "HANDED_OVER", "RESTORE_UNFINISHED", "FINISH"),
    "CLOSE",
)


class GatedStore(FailingStore):
    """Each `load` waits for `reply`, and raises the error that it gives, if any."""

    def __init__(self) -> None:
        super().__init__(durable=True)
        self.is_asked, self.may_answer = Signal(), Signal()
        self.answer: RequestError | None = None

    def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
        self.is_asked.set()
        assert self.may_answer.wait(60)
        self.may_answer.clear()
        if self.answer is not None:
            raise self.answer
        return super().load(session, owner, at)

    def reply(self, answer: RequestError | None = None) -> None:
        self.answer = answer
        self.may_answer.set()


class AnotherReplica:
    """A `Holding` whose other replica answers when the test says so."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, held: Held, continues: bool) -> None: ...

    async def acquire(self, session: str, owner: str, replica: int, handover: Handover) -> None:
        self.answer = asyncio.get_running_loop().create_future()
        self.is_asked.set()
        await self.answer

    async def release(self, session: str) -> None: ...

    async def claim_key(self, owner: str, key: str) -> bool:
        return True

    async def release_key(self, owner: str, key: str) -> None: ...


class Walk:
    """One session, taken from stage to stage by what clients, the store and replicas do."""

    def __init__(
        self,
        async_engine: AsyncEngine,
        sessions: Sessions,
        store: GatedStore,
        replica: AnotherReplica,
    ) -> None:
        self.stage = Stage.ABSENT
        self._async_engine, self._sessions = async_engine, sessions
        self._store, self._replica = store, replica
        self._session, self._names = "sess_unknown", itertools.count()
        self._sink: EventQueue[Event] = EventQueue(10**6)
        self._loading: asyncio.Task[Any] | None = None
        self._runs = self._is_known = False
        self._num_moves = 0

    def events(self) -> list[SessionEvent]:
        """Those of the table that can come now; `SessionEvent.SAVED` follows by itself."""
        found = [event for stage, event in TRANSITIONS if stage is self.stage]
        if self._num_moves == MAX_MOVES:  # the loader gives up after so many
            found = [event for event in found if event is not SessionEvent.HELD_ELSEWHERE]
        if not self._is_known or self._runs:
            found = [event for event in found if event is not SessionEvent.RESTORE]
        if not self._is_known or not self._runs:
            found = [event for event in found if event is not SessionEvent.RESTORE_UNFINISHED]
        return found

    async def take(self, event: SessionEvent) -> None:
        """Lets ``event`` happen; the engine or the loader must then be where the table says."""
        act: Callable[[], Coroutine[Any, Any, None]] = getattr(self, f"_{event.name.lower()}")
        self.stage = TRANSITIONS[self.stage, event]
        await act()
        if self.stage is Stage.LEAVING:
            self.stage = TRANSITIONS[self.stage, SessionEvent.SAVED]
        elif event is SessionEvent.RESTORE_UNFINISHED and self._num_moves:
            self.stage = TRANSITIONS[self.stage, SessionEvent.UNPARK]  # it ran a moment ago
        assert await self._found() is self.stage, event

    async def end(self) -> None:
        """Ends a load that waits."""
        if self.stage is Stage.REMOTE:
            await self.take(SessionEvent.FAIL)
        if self.stage is Stage.LOADING:
            await self.take(SessionEvent.FAIL)

    async def _found(self) -> Stage:
        if self._sessions.loader.is_loading(self._session, "me"):
            return Stage.REMOTE if self._replica.is_asked.is_set() else Stage.LOADING

        def stage_in(engine: Engine, now: float) -> Stage:
            if not engine.kept.has(self._session, "me"):
                return Stage.ABSENT
            info = engine.kept.info(self._session, "me", now)
            stage = engine.kept.stage(self._session, "me")
            assert (info.busy, info.parked) == (stage is not Stage.IDLE, stage is Stage.PARKED)
            return stage

        return await self._async_engine.call(stage_in)

    async def _open(self) -> None:
        self._session = (await self._sessions.create("me")).session
        self._is_known, self._runs = True, False

    async def _load(self) -> None:
        self._num_moves = 0
        self._store.is_asked.clear()
        self._loading = asyncio.create_task(self._sessions.info(self._session, "me"))
        assert await asyncio.to_thread(self._store.is_asked.wait, 60)

    async def _fail(self) -> None:
        assert self._loading is not None
        if self._replica.is_asked.is_set():
            self._replica.is_asked.clear()
            self._replica.answer.set_exception(HeldElsewhere(7))
        else:
            self._store.reply(StoreFailed("the disk is away for a moment"))
        with pytest.raises((HeldElsewhere, StoreFailed)):
            await self._loading

    async def _held_elsewhere(self) -> None:
        self._store.reply(HeldElsewhere(7))
        await self._replica.is_asked.wait()

    async def _handed_over(self) -> None:
        self._num_moves += 1
        self._replica.is_asked.clear()
        self._store.is_asked.clear()
        self._replica.answer.set_result(None)
        assert await asyncio.to_thread(self._store.is_asked.wait, 60)

    async def _restore(self) -> None:
        assert self._loading is not None
        self._store.reply()
        info = await self._loading
        assert info.busy == self._runs

    _restore_unfinished = _restore

    async def _begin(self) -> None:
        self._sink = EventQueue(10**6)
        work = request(f"r{next(self._names)}", 10**6, session=self._session, prompt="")
        await self._sessions.submit(work, self._sink)
        self._runs = True

    async def _park(self) -> None:
        if not self._async_engine.requests.requests(self._sink):
            await self._attach()
        else:
            self._async_engine.requests.hold(self._sink)

    async def _unpark(self) -> None:
        if not self._async_engine.requests.requests(self._sink):
            await self._attach()
            (name,) = self._async_engine.requests.requests(self._sink)
            self._async_engine.requests.caught_up(name)
        else:
            (name,) = self._async_engine.requests.requests(self._sink)
            self._async_engine.requests.caught_up(name)
            self._async_engine.requests.unhold(self._sink)

    async def _attach(self) -> None:
        """A restored request has no reader; a new one finds it parked."""
        self._sink = EventQueue(10**6)
        name = f"r{next(self._names)}"
        await self._sessions.resume(self._session, "me", Cursor(0), name, self._sink, False)

    async def _finish(self) -> None:
        self._runs = False
        await self._sessions.cancel(self._session, "me")
        while (await self._sessions.info(self._session, "me")).busy:
            pass

    async def _evict(self) -> None:
        assert await self._sessions.give(self._session, "me", "move") is None

    async def _close(self) -> None:
        await self._sessions.delete(self._session, "me")
        self._is_known = False


@asynccontextmanager
async def walk() -> AsyncIterator[Walk]:
    store = GatedStore()
    async with driving(
        FakeEngine(can_evict=True, max_detached_tokens=10**9), store=store
    ) as async_engine:
        replica = AnotherReplica()
        walk = Walk(async_engine, Sessions(async_engine, holding=replica), store, replica)
        yield walk
        await walk.end()
        assert not async_engine.died.is_set()


async def test_every_transition_of_the_table_is_taken() -> None:
    taken: set[tuple[Stage, SessionEvent]] = set()
    async with walk() as one:
        for name in EVERY_TRANSITION:
            taken.add((one.stage, SessionEvent[name]))
            await one.take(SessionEvent[name])
    assert taken == {row for row in TRANSITIONS if row[1] is not SessionEvent.SAVED}


@settings(max_examples=25)
@given(choices=st.lists(st.integers(0, 11), max_size=25))
def test_sessions_are_where_the_table_says(choices: list[int]) -> None:
    async def run() -> None:
        async with walk() as one:
            for choice in choices:
                events = one.events()
                await one.take(events[choice % len(events)])

    asyncio.run(run())
