"""Kept sessions wherever they are: in the engine, or asleep in the store.

A session that the engine does not have is fetched when it is wanted. All methods
belong to the async engine's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from server.engine.types import Finished, Request, SessionInfo, TokenEvent
from server.engine.value import Entry, Past, SessionValue
from server.errors import InvalidRequest, RequestError, SessionNotFound
from server.runtime.async_engine import AsyncEngine
from server.runtime.engine_thread import EngineLike
from server.runtime.request_registry import Sink
from server.sessions.loading import Elsewhere, Fetching
from server.sessions.named_states import NamedStates, StateNotFound
from server.sessions.ownership import AttachedElsewhere, How, KeyInUse, Peers
from server.sessions.prefix_tier import PrefixTier
from server.store.base import Keyed, Listed, Numbered
from server.store.errors import HeldElsewhere, HistoryGone, SessionBroken

logger = logging.getLogger("everstream.sessions")

#: Events of a page that is read from the log.
PAGE_EVENTS = 512

#: After any event that a session can have.
MAX_SEQ = 2**53

NO_MORE = "what was done under this key is not in the log any more"

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last event that a client has. ``epoch`` None is the present one."""

    last_seq: int
    epoch: str | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """A session whose events are read again: see `Sessions.resume`.

    ``reset`` says why the events after the cursor cannot be had: then those after
    ``info.seq`` follow.
    """

    info: SessionInfo
    first_seq: int
    reset: str | None


class Sessions:
    """What the routes ask of sessions, beyond running a request."""

    def __init__(
        self,
        async_engine: AsyncEngine,
        prefixes: PrefixTier | None = None,
        elsewhere: Elsewhere | None = None,
        peers: Peers | None = None,
        states: NamedStates | None = None,
    ) -> None:
        self._async_engine, self._prefixes, self._peers = async_engine, prefixes, peers
        self._states = states
        self.fetching = Fetching(async_engine, elsewhere, peers)
        self._keys: set[tuple[str, str]] = set()
        self._giving: set[asyncio.Task[None]] = set()

    async def start(self, continues: bool = False) -> None:
        """After the async engine has started. ``continues``: what was left unfinished goes on."""
        if self._peers is not None:
            await self._peers.start(self, continues)
        if continues:
            await self.continue_unfinished()

    async def submit(self, request: Request, sink: Sink) -> None:
        """See `AsyncEngine.submit`; the session may be asleep."""
        if request.keep or request.session is not None:
            num_new = int(request.session is None)
            await self._within_quota(request.owner, num_new, lambda: self._submit(request, sink))
        else:
            await self._submit(request, sink)

    async def _submit(self, request: Request, sink: Sink) -> None:
        if request.session is None:
            start = None if request.state is None else await self.start_of(request.state)
            if self._prefixes is not None:
                await self._prefixes.fetch(request, start)
            await self._async_engine.submit(request, sink, start)
            return
        self._async_engine.check_retirement()
        session = request.session
        await self.fetching.use(
            session, request.owner, lambda: self._async_engine.submit(request, sink)
        )

    def close(self) -> None:
        """Writes what is outstanding."""
        if self._prefixes is not None:
            self._prefixes.close()

    async def start_of(self, state: str) -> SessionValue:
        """What a session begins with. Raises `StateNotFound`."""
        if self._states is None:
            raise StateNotFound(state)
        return await self._states.start_of(state)

    async def create(self, owner: str, state: str | None = None) -> SessionInfo:
        """A kept session, empty or with a named state. Raises `RequestError`."""
        if state is not None:
            return await self.adopt(await self.start_of(state), owner)
        self._async_engine.check_store()
        return await self._within_quota(
            owner,
            1,
            lambda: self._async_engine.call(
                lambda engine, now: engine.create_session(owner, now), work=True
            ),
        )

    async def continue_unfinished(self) -> None:
        """Lets what ran when the server went down go on by itself, for a while."""
        for session, owner in await self._async_engine.ask_store(lambda store: store.unfinished()):
            try:
                # What others have left may be asked for while this replica runs its own.
                if self._peers is None or not await self.fetching.is_here(session, owner):
                    await self.go_on(session, owner, "never")
            except HeldElsewhere:
                continue  # another replica was quicker
            except RequestError as error:  # no reason not to serve the others
                logger.error("session %s does not go on: %s", session, error)

    async def go_on(self, session: str, owner: str, how: How = "ask") -> None:
        """Lets what a session runs go on, without a reader."""

        def go_on(engine: EngineLike, now: float) -> None:
            self._async_engine.check_running(engine, owner, engine.num_starting(session, owner))
            engine.go_on(session, owner)

        await self.fetching.use(session, owner, lambda: self._async_engine.call(go_on), how)

    async def info(self, session: str, owner: str) -> SessionInfo:
        try:
            info = await self._call(
                session, owner, lambda engine, now: engine.session_info(session, owner, now)
            )
        except AttachedElsewhere as attached:
            return attached.info
        await self._confirm(session, owner)
        return info

    async def delete(self, session: str, owner: str) -> None:
        def delete(engine: EngineLike, now: float) -> None:
            engine.delete_session(session, owner)

        try:
            await self.fetching.use(session, owner, lambda: self._async_engine.call(delete), "move")
        except SessionBroken:
            await self._async_engine.ask_store(lambda store: store.discard(session, owner))

    async def cancel(self, session: str, owner: str) -> None:
        """Ends what the session runs."""
        await self.fetching.use(
            session,
            owner,
            lambda: self._async_engine.call(
                lambda engine, now: engine.cancel_session(session, owner)
            ),
            "move",
        )

    async def listed(self, owner: str, after: str | None, limit: int) -> list[Listed]:
        return await self._async_engine.ask_store(lambda store: store.list(owner, after, limit))

    async def fork(self, session: str, owner: str, num: int, at: int | None) -> list[SessionInfo]:
        """``num`` copies, as the session is, or as it was when its text had ``at`` tokens."""
        self._async_engine.check_store()

        async def fork() -> list[SessionInfo]:
            self._async_engine.check_retirement()
            past = None if at is None else await self._past(session, owner, at)
            return await self._call(
                session,
                owner,
                lambda engine, now: engine.fork(session, owner, num, now, past),
                work=True,
            )

        return await self._within_quota(owner, num, fork)

    async def rewind(self, session: str, owner: str, at: int) -> SessionInfo:
        """Cuts the session's text back to ``at`` tokens."""
        self._async_engine.check_retirement()
        past = await self._past(session, owner, at)
        return await self._call(
            session, owner, lambda engine, now: engine.rewind(session, owner, past, now), work=True
        )

    async def value(self, session: str, owner: str) -> SessionValue:
        """The session as it is now."""
        value = await self._call(session, owner, lambda engine, now: engine.value(session, owner))
        await self._confirm(session, owner)
        return value

    async def adopt(self, value: SessionValue, owner: str) -> SessionInfo:
        """A new session that goes on from ``value``."""
        self._async_engine.check_store()
        return await self._within_quota(
            owner,
            1,
            lambda: self._async_engine.call(
                lambda engine, now: engine.adopt(value, owner, now), work=True
            ),
        )

    async def _within_quota(self, owner: str, num_new: int, act: Callable[[], Awaitable[R]]) -> R:
        """The result of ``act``, which keeps ``num_new`` sessions more.

        Of an owner with a bound, one at a time: the next check sees what this one has made.
        So ``act`` goes on to its end where its caller leaves meanwhile.
        """
        tenant = self._async_engine.tenants.get(owner)
        if tenant is None or tenant.limits.max_sessions is None or not num_new:
            await self._check_quota(owner, num_new)
            return await act()
        async with tenant.keeping:
            await self._check_quota(owner, num_new)
            acting: asyncio.Future[R] = asyncio.ensure_future(act())
            try:
                return await asyncio.shield(acting)
            except asyncio.CancelledError:
                await asyncio.wait({acting})
                if not acting.cancelled():
                    acting.exception()  # nobody is left to be told
                raise

    async def _check_quota(self, owner: str, num_new: int) -> None:
        """Raises `RateLimited` where the owner keeps as much as it may."""
        tenant = self._async_engine.tenants.get(owner)
        if tenant is None:
            return
        max_sessions, max_bytes = tenant.limits.max_sessions, tenant.limits.max_stored_bytes
        if max_sessions is not None and num_new:
            kept = await self._async_engine.ask_store(
                lambda store: store.list(owner, None, max_sessions)
            )
            tenant.check_room("max_sessions", len(kept) + num_new)
        if max_bytes is not None:
            num_bytes = await self._async_engine.ask_store(lambda store: store.stored_bytes(owner))
            tenant.check_room("max_stored_bytes", num_bytes + 1)

    # Resuming

    async def resume(
        self, session: str, owner: str, cursor: Cursor, request_id: str, sink: Sink, take_over: bool
    ) -> Resumed:
        """Makes ``sink`` the reader of the session, from ``cursor`` on.

        What the session runs is parked until the caller has sent what `missed`
        gives, and calls `AsyncEngine.caught_up`; its events come under ``request_id``.
        """
        current = self._async_engine.epoch_name
        try:
            info = await self.fetching.use(
                session,
                owner,
                lambda: self._async_engine.attach(session, owner, request_id, sink, take_over),
                "take_over" if take_over else "ask",
            )
            # The store is asked first: it knows whether what is here is still the session.
            try:
                await self._page(session, owner, cursor.last_seq, 1)
                is_gone = False
            except HistoryGone:
                is_gone = True
        except SessionNotFound:
            if cursor.epoch is None or _same_store(cursor.epoch, current(0)):
                raise
            self._async_engine.detach(request_id)
            lost = SessionInfo(session, 0, 0, False, 0.0, 0)
            return Resumed(lost, 0, "the server's store is another one than before")
        if cursor.epoch is not None and cursor.epoch != current(info.epoch):
            return Resumed(info, info.seq, "the session was rewound")
        if cursor.last_seq > info.seq:
            return Resumed(info, info.seq, "the session has not had that many events")
        if is_gone:
            return Resumed(info, info.seq, "the log does not reach back that far")
        return Resumed(info, cursor.last_seq, None)

    async def missed(
        self, owner: str, resumed: Resumed, request_id: str
    ) -> AsyncIterator[list[TokenEvent | Finished]]:
        """The events between the cursor and the present, in pages, under ``request_id``."""
        seq, session = resumed.first_seq, resumed.info.session
        while seq < resumed.info.seq:
            page = await self._page(session, owner, seq, PAGE_EVENTS)
            page = [event for event in page if event.seq <= resumed.info.seq]
            if not page:
                return
            seq = page[-1].seq
            yield [_renamed(event, request_id) for event in page]

    async def _page(
        self, session: str, owner: str, after: int, limit: int
    ) -> list[TokenEvent | Finished]:
        return await self._async_engine.ask_store(
            lambda store: store.read(session, owner, after, limit)
        )

    async def log(self, session: str, owner: str) -> AsyncIterator[list[Entry]]:
        """The entries of the log that are kept, in pages, up to about the present."""
        page = await self._log_page(session, owner, 0)
        while page:
            yield [entry for _, entry in page]
            if len(page) < PAGE_EVENTS:  # what the session runs may add entries without an end
                return
            page = await self._log_page(session, owner, page[-1][0] + 1)

    async def _log_page(self, session: str, owner: str, place: int) -> Numbered:
        return await self._async_engine.ask_store(
            lambda store: store.entries(session, owner, place, PAGE_EVENTS)
        )

    # The same work twice

    async def find_key(self, owner: str, key: str) -> Keyed | None:
        """What has been done under ``key``. Raises `KeyInUse` while that is not yet known."""
        if (owner, key) in self._keys:
            raise KeyInUse
        found = await self._async_engine.ask_store(lambda store: store.find_key(owner, key))
        if found is not None and found.is_append and found.finished is None:
            # Where the server went down meanwhile it rests, and nobody can resume an append.
            await self.go_on(found.session, owner)
        return found

    async def submit_once(self, request: Request, sink: Sink) -> Keyed | None:
        """Submits a request that has a key, unless its work has been done: returns that then."""
        assert request.key is not None
        key = (request.owner, request.key)
        found = await self.find_key(*key)
        if found is not None:
            return found
        if key in self._keys:
            raise KeyInUse
        self._keys.add(key)
        left = False
        try:
            return await self._submit_first(key, request, sink)
        except asyncio.CancelledError:
            left = True
            raise
        finally:
            giving = asyncio.ensure_future(self._give_back(key, left))
            self._giving.add(giving)
            giving.add_done_callback(self._giving.discard)
            await asyncio.shield(giving)

    async def _submit_first(
        self, key: tuple[str, str], request: Request, sink: Sink
    ) -> Keyed | None:
        """Of all replicas too."""
        if self._peers is None:
            await self.submit(request, sink)
            return None
        await self._peers.claim_key(*key)
        found = await self._async_engine.ask_store(lambda store: store.find_key(*key))
        if found is None:
            await self.submit(request, sink)
        return found

    async def _give_back(self, key: tuple[str, str], left: bool) -> None:
        """What came under the key is in the log then, or will never be.

        ``left``: whoever asked has gone, and the engine may be about to do it all the same.
        """
        try:
            if left:
                await self._async_engine.settled()
            if self._peers is not None:
                await self._peers.give_back_key(*key)
        finally:
            self._keys.discard(key)

    async def again(self, owner: str, found: Keyed, request_id: str, sink: Sink) -> Resumed:
        """Makes ``sink`` the reader of a generation that was begun under a key: see `resume`.

        One that has ended is read from the log, whatever its session does now. Raises
        `HistoryGone` where it cannot be had any more.
        """
        if found.finished is None:
            cursor = Cursor(found.first_seq)
            resumed = await self.resume(found.session, owner, cursor, request_id, sink, False)
            if resumed.reset is not None:
                raise HistoryGone(NO_MORE)
            return resumed
        await self._page(found.session, owner, found.first_seq, 1)
        end, info = found.finished, await self.info(found.session, owner)
        then = replace(info, seq=end.seq, position=end.position, busy=False, parked=False)
        return Resumed(then, found.first_seq, None)

    # What the store has

    async def has(self, session: str, owner: str) -> bool:
        """Whether the store has it; it is not fetched. Raises `StoreError` where nobody knows."""
        try:
            await self._async_engine.ask_store(lambda store: store.read(session, owner, MAX_SEQ, 1))
        except SessionNotFound:
            return False
        return True

    async def _confirm(self, session: str, owner: str) -> None:
        """Raises `StoreError` where another replica may have gone on with the session."""
        if self._peers is not None:
            await self._page(session, owner, MAX_SEQ, 1)

    async def _past(self, session: str, owner: str, at: int) -> Past:
        if at < 0:
            raise InvalidRequest("at: must be at least 0", "at")
        return await self.fetching.past(session, owner, at)

    async def _call(
        self,
        session: str,
        owner: str,
        call: Callable[[EngineLike, float], R],
        work: bool = False,
    ) -> R:
        return await self.fetching.use(
            session, owner, lambda: self._async_engine.call(call, work=work)
        )


def _same_store(one: str, other: str) -> bool:
    return one.rpartition("-")[0] == other.rpartition("-")[0]


def _renamed(event: TokenEvent | Finished, request_id: str) -> TokenEvent | Finished:
    if isinstance(event, TokenEvent):
        return event._replace(request_id=request_id)
    return replace(event, request_id=request_id)
