"""Sessions that the engine does not have: where they are, and how they are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol, TypeVar, get_args

from server.engine.session import Past, SessionEvent, Stage, after
from server.engine.types import Finished, SessionInfo, TokenEvent
from server.errors import RequestError, SessionAttached, SessionNotFound
from server.runtime.async_engine import AsyncEngine
from server.runtime.commands import Absent, Arrival, Call, on_session
from server.store.base import (
    HeldElsewhere,
    HistoryGone,
    Loaded,
    Numbered,
    SnapshotMismatch,
    Store,
    StoreFailed,
)

# -------------------------------------------------------------------------------------------------
# The sessions that a store shared by several replicas gives to each of them.
#
# `server.cluster.shared` implements `Holding` over PostgreSQL, and tells the sessions
# of this replica, as `Held`, what the other replicas ask.


#: What happens to the reader that a session has at its holder, when another replica
#: asks for it. "ask": the session stays with the reader. "take_over": the reader is cut off.
#: "move": the reader is redirected. "never": the holder is not asked.
Handover = Literal["ask", "take_over", "move", "never"]


class AttachedElsewhere(SessionAttached):
    """The session has a reader at its holder, where ``info`` describes it."""

    def __init__(self, info: SessionInfo) -> None:
        super().__init__()
        self.info = info


class Held(Protocol):
    """The sessions of this replica, for the others."""

    async def give(
        self, session: str, owner: str, handover: Handover
    ) -> SessionInfo | Absent | None:
        """Saves the session and releases it; None when that is done.

        `Absent` where this replica's engine has none, and its `SessionInfo` where it stays
        with its reader.
        """

    async def continue_unfinished(self) -> None:
        """Continues what a replica that is gone had not finished."""


class Holding(Protocol):
    """Which replica has a session. All methods belong to the async engine's event loop."""

    async def start(self, held: Held, continues: bool) -> None:
        """Listens to the other replicas from now on, and reclaims those that die.

        ``continues``: what they had not finished continues by itself.
        """

    async def acquire(self, session: str, owner: str, replica: int, handover: Handover) -> None:
        """Asks the holder for the session; then the store may load it here.

        Raises `AttachedElsewhere`, and `HeldElsewhere` where there is no answer.
        """

    async def release(self, session: str) -> None:
        """Gives back a session that the store has loaded here to no purpose."""

    async def claim_key(self, owner: str, key: str) -> bool:
        """Reserves an idempotency key; False where another replica has reserved it."""

    async def release_key(self, owner: str, key: str) -> None:
        """Gives an idempotency key back, after `claim_key`, whatever that has returned."""


# -------------------------------------------------------------------------------------------------
# Resuming a session: the client's cursor, and whether the events after it can be sent.


#: Events of a page that is read from the log.
PAGE_EVENTS = 512

#: Why a cursor of another epoch has no place in the session's log.
REWOUND = "the session was rewound"
OTHER_STORE = "the server's store is another one than before, such as a restored copy"


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last event that a client has. ``epoch`` None is the present one."""

    last_seq: int
    epoch: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """The first events after ``after_seq``; with ``is_gone`` the log begins later."""

    after_seq: int
    events: tuple[TokenEvent | Finished, ...]
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class Resumed:
    """A session with a new reader: see `server.sessions.sessions.Sessions.resume`.

    ``reset`` says why the events after the cursor are not available: then the events after
    ``info.seq`` follow. ``first_page`` are the first events after ``first_seq``, read already.
    """

    info: SessionInfo
    first_seq: int
    reset: str | None
    first_page: tuple[TokenEvent | Finished, ...] = ()


def resumed(info: SessionInfo, cursor: Cursor, epoch_name: str, page: Page) -> Resumed:
    """The session as ``info`` says, read from ``cursor`` on, where ``page`` begins.

    ``epoch_name`` is that of its epoch.
    """
    if cursor.epoch is not None and cursor.epoch != epoch_name:
        is_rewound = _store_of(cursor.epoch) == _store_of(epoch_name)
        return Resumed(info, info.seq, REWOUND if is_rewound else OTHER_STORE)
    if cursor.last_seq > info.seq:
        return Resumed(info, info.seq, "the session has not had that many events")
    if page.is_gone:
        return Resumed(info, info.seq, "the log does not reach back that far")
    return Resumed(info, cursor.last_seq, None, page.events)


def resumed_elsewhere(session: str, cursor: Cursor, epoch_name: str) -> Resumed | None:
    """A reset, for a session that the store does not have and another store may have had.

    None where the cursor names no store or this one, to which ``epoch_name`` belongs.
    """
    if cursor.epoch is None or _store_of(cursor.epoch) == _store_of(epoch_name):
        return None
    lost = SessionInfo(session, 0, 0, False, 0.0, 0)
    return Resumed(lost, 0, OTHER_STORE)


def renamed(event: TokenEvent | Finished, request_id: str) -> TokenEvent | Finished:
    """``event`` as one of the request ``request_id``."""
    if isinstance(event, TokenEvent):
        return event._replace(request_id=request_id)
    return replace(event, request_id=request_id)


def _store_of(epoch_name: str) -> str:
    return epoch_name.rpartition("-")[0]


# -------------------------------------------------------------------------------------------------
# Questions to the store that take more than one of its methods. The store thread runs them.


@dataclass(frozen=True, slots=True)
class LogPage:
    """Some entries of a log with their numbers, from ``start`` on; its next one gets ``end``."""

    start: int
    entries: Numbered
    end: int


def read_log(store: Store, session: str, owner: str, place: int | None) -> LogPage:
    """The entries of a session's log from number ``place`` on; None is the oldest that is kept.

    Raises `SessionNotFound`, `SessionBroken` or `HistoryGone`.
    """
    end = store.log_end(session, owner)
    if place is not None and place > end:
        return LogPage(place, [], end)
    entries = store.entries(session, owner, place or 0, PAGE_EVENTS)
    start = entries[0][0] if entries else end
    if place not in (None, start):
        raise HistoryGone("the stream begins later: older messages are no longer kept", "offset")
    return LogPage(start, entries, max(end, start + len(entries)))


def read_page(store: Store, session: str, owner: str, after_seq: int) -> Page:
    """Raises `SessionNotFound` and `SessionBroken`."""
    try:
        return Page(after_seq, tuple(store.read(session, owner, after_seq, PAGE_EVENTS)))
    except HistoryGone:
        return Page(after_seq, (), is_gone=True)


def load_session(
    store: Store, session: str, owner: str, at: int | None = None, after_seq: int | None = None
) -> tuple[Loaded, Page | None] | HeldElsewhere:
    """The session, as `Store.load` gives it, and the first page of its events after ``after_seq``.

    Raises what `Store.load` raises, but returns `HeldElsewhere`.
    """
    try:
        loaded = store.load(session, owner, at)
    except HeldElsewhere as held:
        return held
    return loaded, None if after_seq is None else read_page(store, session, owner, after_seq)


# -------------------------------------------------------------------------------------------------
# Sessions that the engine does not have: loaded from the store, or from another replica.
#
# A command on a session is sent to the engine at once. Where the engine does not have the
# session, the store is asked, and the same command is sent again with what it has loaded:
# the engine restores the session and runs the command in one turn.


#: A session that many replicas want may have continued before this one gets it.
MAX_MOVES = 3

#: A command of which only the restoring matters.
_BRING: Call[None] = lambda engine, now: None  # noqa: E731

R = TypeVar("R")

#: Whose a session is in the store of another version of the model; it may block.
Elsewhere = Callable[[str], str | None]


class OtherVersion(SnapshotMismatch):
    """The session was made by another version of its model."""

    def __init__(self) -> None:
        super().__init__(
            "the session belongs to another version of the model; it is kept, and continues where "
            "that version is served",
            "session",
        )


@dataclass(frozen=True, slots=True)
class LoadedSession(Arrival):
    """``page``: events of its log, where these were asked for; see `SessionLoader.use`."""

    page: Page | None = None


@dataclass(eq=False, slots=True)
class _Load:
    """A load in progress. The first of those who wait for it takes what was loaded."""

    session: str
    owner: str
    handover: Handover
    after_seq: int | None
    stage: Stage = Stage.LOADING
    num_waiting: int = 0
    loaded: LoadedSession | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> LoadedSession | None:
        loaded, self.loaded = self.loaded, None
        return loaded


class SessionLoader:
    """Loads each session once at a time, whatever number of commands wait for it."""

    def __init__(
        self, async_engine: AsyncEngine, elsewhere: Elsewhere | None, holding: Holding | None
    ) -> None:
        self._async_engine, self._elsewhere = async_engine, elsewhere
        self._holding = holding
        self._loads: dict[tuple[str, str, Handover], tuple[_Load, asyncio.Task[None]]] = {}

    async def use(
        self,
        session: str,
        owner: str,
        call: Call[R],
        handover: Handover = "ask",
        after_seq: int | None = None,
        *,
        request_ids: tuple[str, ...] = (),
        arrived: Callable[[R], None] | None = None,
        work: bool = False,
    ) -> tuple[R, Page | None]:
        """What ``call`` gives, with the session loaded where the engine does not have it.

        Where it is loaded for this call, it comes with the first page of its events after
        ``after_seq``. For the other arguments see `AsyncEngine.call`. Raises
        `SessionNotFound` where the store does not have the session.
        """
        engine, loaded = self._async_engine, None
        for num_loads in range(MAX_MOVES + 1):
            if num_loads:
                loaded = await self._loaded(session, owner, handover, after_seq)
            try:
                found: R | Absent = await engine.call(
                    on_session(session, owner, call, loaded),
                    request_ids=request_ids,
                    arrived=arrived,
                    session=session,
                    work=work or loaded is not None,
                )
            except RequestError:
                if loaded is not None:
                    await self._release(session, owner)
                raise
            if not isinstance(found, Absent):
                return found, None if loaded is None else loaded.page
        # others have taken its room each time
        raise StoreFailed("the session is evicted again and again; try again")

    async def past(self, session: str, owner: str, at: int) -> Past:
        """The session as it was when its text had ``at`` tokens."""
        read = partial(load_session, session=session, owner=owner, at=at)
        found = await self._async_engine.ask_store(read)
        if isinstance(found, HeldElsewhere):
            await self.use(session, owner, _BRING)
            found = await self._async_engine.ask_store(read)
        if isinstance(found, HeldElsewhere):
            raise found
        return Past(found[0].value, found[0].entries, at)

    async def is_here(self, session: str, owner: str) -> bool:
        """Whether the engine has the session."""
        return await self._async_engine.call(lambda engine, now: engine.kept.has(session, owner))

    def is_loading(self, session: str, owner: str) -> bool:
        """Whether a command may be about to bring the session."""
        return bool(self._of(session, owner))

    async def ended(self, session: str, owner: str) -> None:
        """Returns when no command waits for the session to be loaded."""
        while loads := self._of(session, owner):
            await loads[0].ended.wait()

    def _of(self, session: str, owner: str) -> list[_Load]:
        keys = ((session, owner, handover) for handover in get_args(Handover))
        return [self._loads[key][0] for key in keys if key in self._loads]

    async def _release(self, session: str, owner: str) -> None:
        """Lets another replica have a session that was loaded here, and could not be restored."""
        if self._holding is not None and not await self.is_here(session, owner):
            await self._holding.release(session)

    # One load

    async def _loaded(
        self, session: str, owner: str, handover: Handover, after_seq: int | None
    ) -> LoadedSession | None:
        """What was loaded; None where the command of another caller brings it."""
        key = (session, owner, handover)
        while key not in self._loads and (others := self._of(session, owner)):
            await others[0].ended.wait()
        if key not in self._loads:
            load = _Load(session, owner, handover, after_seq)
            task = asyncio.ensure_future(self._load(load))
            self._loads[key] = load, task
            task.add_done_callback(partial(self._end, load))
        load, task = self._loads[key]
        load.num_waiting += 1
        try:
            await asyncio.shield(task)
            return load.take()
        finally:
            load.num_waiting -= 1
            self._end(load, task)

    def _end(self, load: _Load, task: asyncio.Task[None]) -> None:
        """Ends a load for which no caller waits any more; what none of them took is restored."""
        if load.num_waiting or not task.done() or load.ended.is_set():
            return
        load.ended.set()
        del self._loads[load.session, load.owner, load.handover]
        if not task.cancelled():
            task.exception()  # those who waited have it
        if (loaded := load.take()) is not None:
            self._async_engine.tell(on_session(load.session, load.owner, _BRING, loaded))

    async def _load(self, load: _Load) -> None:
        engine, num_moves = self._async_engine, 0
        engine.check_retirement()
        generation = engine.generation
        read = partial(
            load_session, session=load.session, owner=load.owner, after_seq=load.after_seq
        )
        try:
            while isinstance(found := await engine.ask_store(read), HeldElsewhere):
                if num_moves == MAX_MOVES:
                    raise found
                await self._move(load, found)
                num_moves += 1
        except RequestError as error:
            load.stage = after(load.stage, SessionEvent.FAIL)
            if isinstance(error, SessionNotFound):
                await self.check_elsewhere(load.session, load.owner)
            raise
        loaded, page = found
        past = Past(loaded.value, loaded.entries)
        load.loaded = LoadedSession(
            past, lambda: engine.generation == generation, continues=num_moves > 0, page=page
        )

    async def _move(self, load: _Load, held: HeldElsewhere) -> None:
        """Gets the session from the replica that holds it."""
        if self._holding is None or load.handover == "never":
            raise held
        load.stage = after(load.stage, SessionEvent.HELD_ELSEWHERE)
        await self._holding.acquire(load.session, load.owner, held.replica, load.handover)
        load.stage = after(load.stage, SessionEvent.HANDED_OVER)

    async def check_elsewhere(self, session: str, owner: str) -> None:
        """Raises `OtherVersion` where ``owner`` has the session in another version's store."""
        if self._elsewhere is None:
            return
        if await asyncio.to_thread(self._elsewhere, session) == owner:
            raise OtherVersion
