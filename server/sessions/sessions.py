"""Kept sessions wherever they are: in the engine, in the store, at another replica or in a file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

from server.engine.engine import Engine
from server.engine.session import Past, SessionValue
from server.engine.types import Finished, Request, SessionInfo, TokenEvent
from server.errors import InvalidRequest, RequestError, SessionNotFound
from server.runtime import commands
from server.runtime.async_engine import AsyncEngine
from server.runtime.commands import Absent, Call
from server.runtime.readers import Sink
from server.sessions.loader import (
    PAGE_EVENTS,
    AttachedElsewhere,
    Cursor,
    Elsewhere,
    Handover,
    Holding,
    LogPage,
    Resumed,
    SessionLoader,
    read_log,
    read_page,
    renamed,
    resumed,
    resumed_elsewhere,
)
from server.sessions.origins import NamedStates, PrefixTier, StateNotFound
from server.store.base import (
    HeldElsewhere,
    HistoryGone,
    Identity,
    Keyed,
    Listed,
    Numbered,
    SessionBroken,
)
from server.store.states import export_session, import_session

# -------------------------------------------------------------------------------------------------
# The tenants' limits on kept sessions: how many there are, and the bytes that they take.


@asynccontextmanager
async def within_quota(async_engine: AsyncEngine, owner: str, num_new: int) -> AsyncIterator[None]:
    """Checks that the owner may keep ``num_new`` more sessions. Raises `RateLimited`.

    The sessions are made in the body. For an owner with a limit, one body runs at a time, so
    that each check counts what the body before has made, also where that was cancelled.
    """
    tenant = async_engine.tenants.get(owner)
    if tenant is None or tenant.limits.max_sessions is None or not num_new:
        await _check(async_engine, owner, num_new)
        yield
        return
    async with tenant.keeping:
        await _check(async_engine, owner, num_new)
        try:
            yield
        except asyncio.CancelledError:  # the engine may still make what it was asked for
            await async_engine.settled()
            raise


async def _check(async_engine: AsyncEngine, owner: str, num_new: int) -> None:
    tenant = async_engine.tenants.get(owner)
    if tenant is None:
        return
    max_sessions, max_bytes = tenant.limits.max_sessions, tenant.limits.max_stored_bytes
    if max_sessions is not None and num_new:
        kept = await async_engine.ask_store(lambda store: store.list(owner, None, max_sessions))
        tenant.check_room("max_sessions", len(kept) + num_new)
    if max_bytes is not None:
        num_bytes = await async_engine.ask_store(lambda store: store.stored_bytes(owner))
        tenant.check_room("max_stored_bytes", num_bytes + 1)


# -------------------------------------------------------------------------------------------------
# A session that the engine does not have is loaded when it is wanted. All methods
# belong to the async engine's event loop.


logger = logging.getLogger("everstream.sessions")

#: After any event that a session can have.
MAX_SEQ = 2**53

R = TypeVar("R")


class Sessions:
    """What the routes ask of sessions, beyond running a request."""

    def __init__(
        self,
        async_engine: AsyncEngine,
        prefixes: PrefixTier | None = None,
        elsewhere: Elsewhere | None = None,
        holding: Holding | None = None,
        states: NamedStates | None = None,
    ) -> None:
        self._async_engine, self._prefixes, self._holding = async_engine, prefixes, holding
        self._states = states
        self.loader = SessionLoader(async_engine, elsewhere, holding)

    async def start(self, continues: bool = False) -> None:
        """After the async engine has started. ``continues``: what was left unfinished continues."""
        if self._holding is not None:
            await self._holding.start(self, continues)
        if continues:
            await self.continue_unfinished()

    async def submit(self, request: Request, sink: Sink) -> None:
        """Starts a request; its events go to ``sink``. Raises `RequestError`.

        The caller calls `RequestRegistry.release` with the sink when it has no reader any more.
        """
        engine, owner, session = self._async_engine, request.owner, request.session
        is_kept = request.keep or session is not None
        num_new = int(session is None)
        async with within_quota(engine, owner, num_new) if is_kept else nullcontext():
            start = None if request.state is None else await self.start_of(request.state)
            if session is not None:
                engine.check_retirement()
            elif self._prefixes is not None:
                await self._prefixes.fetch(request, start)
            if is_kept:
                engine.check_store()
            if (tenant := engine.tenants.get(owner)) is not None:
                tenant.check_tokens()
            call = commands.submit(request, start, tenant)
            with engine.requests.accepting(request, sink):
                if session is None:
                    await engine.call(call, request_ids=request.ids, work=True)
                else:
                    ids = request.ids
                    await self.loader.use(session, owner, call, request_ids=ids, work=True)

    async def save_prefixes(self) -> None:
        """Before the async engine stops: `close` writes what a restart should find."""
        if self._prefixes is not None:
            await self._prefixes.save()

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
        return await self._open(owner, lambda engine, now: engine.kept.create(owner, now))

    async def continue_unfinished(self) -> None:
        """Lets what ran when the server went down continue by itself, for a while."""
        for session, owner in await self._async_engine.ask_store(lambda store: store.unfinished()):
            try:
                # What others have left may be asked for while this replica runs its own.
                if self._holding is None or not await self.loader.is_here(session, owner):
                    await self.continue_unattended(session, owner, "never")
            except HeldElsewhere:
                continue  # another replica was quicker
            except RequestError as error:  # no reason not to serve the others
                logger.error("session %s could not be continued: %s", session, error)

    async def continue_unattended(
        self, session: str, owner: str, handover: Handover = "ask"
    ) -> None:
        """Lets what a session runs continue, without a reader."""
        tenant = self._async_engine.tenants.get(owner)
        await self._call(
            session, owner, commands.continue_unattended(session, owner, tenant), handover
        )

    async def info(self, session: str, owner: str) -> SessionInfo:
        try:
            info = await self._call(
                session, owner, lambda engine, now: engine.kept.info(session, owner, now)
            )
        except AttachedElsewhere as attached:
            return attached.info
        await self._confirm(session, owner)
        return info

    async def delete(self, session: str, owner: str) -> None:
        try:
            await self._call(
                session, owner, lambda engine, now: engine.kept.delete(session, owner), "move"
            )
        except SessionBroken:
            await self._async_engine.ask_store(lambda store: store.discard(session, owner))

    async def cancel(self, session: str, owner: str) -> None:
        """Ends what the session runs."""
        await self._call(
            session, owner, lambda engine, now: engine.cancel_session(session, owner), "move"
        )

    async def listed(self, owner: str, after: str | None, limit: int) -> list[Listed]:
        return await self._async_engine.ask_store(lambda store: store.list(owner, after, limit))

    async def fork(self, session: str, owner: str, num: int, at: int | None) -> list[SessionInfo]:
        """``num`` copies, as the session is, or as it was when its text had ``at`` tokens."""
        self._async_engine.check_store()
        async with within_quota(self._async_engine, owner, num):
            self._async_engine.check_retirement()
            past = None if at is None else await self._past(session, owner, at)
            return await self._call(
                session,
                owner,
                lambda engine, now: engine.kept.fork(session, owner, num, now, past),
                work=True,
            )

    async def rewind(self, session: str, owner: str, at: int) -> SessionInfo:
        """Cuts the session's text back to ``at`` tokens."""
        self._async_engine.check_retirement()
        past = await self._past(session, owner, at)
        return await self._call(
            session,
            owner,
            lambda engine, now: engine.kept.rewind(session, owner, past, now),
            work=True,
        )

    async def value(self, session: str, owner: str) -> SessionValue:
        """The session as it is now."""
        value = await self._call(
            session, owner, lambda engine, now: engine.kept.value(session, owner)
        )
        await self._confirm(session, owner)
        return value

    async def adopt(self, value: SessionValue, owner: str) -> SessionInfo:
        """A new session that continues from ``value``."""
        return await self._open(owner, lambda engine, now: engine.kept.adopt(value, owner, now))

    async def _open(self, owner: str, call: Call[SessionInfo]) -> SessionInfo:
        self._async_engine.check_store()
        async with within_quota(self._async_engine, owner, 1):
            return await self._async_engine.call(call, work=True)

    # Resuming

    async def resume(
        self, session: str, owner: str, cursor: Cursor, request_id: str, sink: Sink, take_over: bool
    ) -> Resumed:
        """Makes ``sink`` the reader of the session, from ``cursor`` on.

        What the session runs is parked until the caller has sent what `missed`
        gives, and calls `RequestRegistry.caught_up`; its events come under ``request_id``.
        """
        engine = self._async_engine
        tenant = engine.tenants.get(owner)
        attach = commands.Attach(session, owner, request_id, take_over, tenant)

        def add_reader(info: SessionInfo) -> None:
            if info.busy:
                engine.requests.add(request_id, sink, behind=True)

        try:
            info, page = await self.loader.use(
                *(session, owner, attach, "take_over" if take_over else "ask", cursor.last_seq),
                arrived=add_reader,
                work=True,
            )
            if page is None or page.after_seq != cursor.last_seq:
                # The store knows whether what the engine has is still the session.
                page = await engine.ask_store(
                    lambda store: read_page(store, session, owner, cursor.last_seq)
                )
        except asyncio.CancelledError:  # the client has left, and `release` knew nothing of it yet
            engine.requests.detach(request_id)
            raise
        except SessionNotFound:
            reset = resumed_elsewhere(session, cursor, engine.epoch_name(0))
            if reset is None:
                raise
            engine.requests.detach(request_id)
            return reset
        except RequestError:
            if attach.is_attached:  # and what was recorded with it is lost
                engine.requests.detach(request_id)
            raise
        return resumed(info, cursor, engine.epoch_name(info.epoch), page)

    async def missed(
        self, owner: str, found: Resumed, request_id: str
    ) -> AsyncIterator[list[TokenEvent | Finished]]:
        """The events between the cursor and the present, in pages, under ``request_id``."""
        seq, session = found.first_seq, found.info.session
        read: Sequence[TokenEvent | Finished] = found.first_page
        while seq < found.info.seq:
            read = read or await self.read(session, owner, seq, PAGE_EVENTS)
            page = [event for event in read if event.seq <= found.info.seq]
            read = ()
            if not page:
                return
            seq = page[-1].seq
            yield [renamed(event, request_id) for event in page]

    async def read(
        self, session: str, owner: str, after: int, limit: int
    ) -> list[TokenEvent | Finished]:
        """At most ``limit`` events after ``after``, from the log. Raises `HistoryGone`."""
        return await self._async_engine.ask_store(
            lambda store: store.read(session, owner, after, limit)
        )

    async def entries(self, session: str, owner: str, place: int) -> Numbered:
        """At most `PAGE_EVENTS` entries of the log, from number ``place`` on."""
        return await self._async_engine.ask_store(
            lambda store: store.entries(session, owner, place, PAGE_EVENTS)
        )

    async def log(self, session: str, owner: str, place: int | None) -> LogPage:
        """See `read_log`: the session stays where it is, and with its reader."""
        return await self._async_engine.ask_store(
            lambda store: read_log(store, session, owner, place)
        )

    @property
    def are_shared(self) -> bool:
        """Whether other replicas may add to the logs of the sessions."""
        return self._holding is not None

    # Other replicas

    async def give(
        self, session: str, owner: str, handover: Handover
    ) -> SessionInfo | Absent | None:
        """See `server.sessions.loader.Held`."""

        def give(engine: Engine, now: float) -> SessionInfo | None:
            return engine.kept.give(session, owner, handover, now)

        while True:
            await self.loader.ended(session, owner)
            found = await self._async_engine.call(commands.on_session(session, owner, give))
            if not isinstance(found, Absent) or not self.loader.is_loading(session, owner):
                return found

    # What the store has

    async def has(self, session: str, owner: str) -> bool:
        """Whether the store has it; it is not loaded. Raises `StoreError` where the store fails."""
        try:
            await self._async_engine.ask_store(lambda store: store.read(session, owner, MAX_SEQ, 1))
        except SessionNotFound:
            return False
        return True

    async def _confirm(self, session: str, owner: str) -> None:
        """Raises `StoreError` where another replica may have continued the session."""
        if self._holding is not None:
            await self.read(session, owner, MAX_SEQ, 1)

    async def _past(self, session: str, owner: str, at: int) -> Past:
        if at < 0:
            raise InvalidRequest("at: must be at least 0", "at")
        return await self.loader.past(session, owner, at)

    async def _call(
        self,
        session: str,
        owner: str,
        call: Call[R],
        handover: Handover = "ask",
        work: bool = False,
    ) -> R:
        """What ``call`` gives on the engine thread, with the session loaded first if need be."""
        return (await self.loader.use(session, owner, call, handover, work=work))[0]


# -------------------------------------------------------------------------------------------------
# Sessions as files: signed on the way out, checked on the way in.


@dataclass(frozen=True, slots=True)
class Signing:
    """What a state must belong to, and the key that vouches for it."""

    identity: Identity
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Transfer:
    """``key`` signs; with ``trust_unsigned`` a file that is not signed by it is taken too."""

    sessions: Sessions
    identity: Identity
    key: bytes = field(repr=False)
    trust_unsigned: bool = False

    async def export(self, session: str, owner: str) -> bytes:
        """The session as it is now, without what it runs. Raises `RequestError`."""
        value = await self.sessions.value(session, owner)
        return await asyncio.to_thread(export_session, value, self.identity, self.key)

    async def take(self, data: bytes, owner: str) -> SessionInfo:
        """A new session of ``owner`` from a file. Raises `RequestError`."""
        value = await asyncio.to_thread(
            import_session, data, self.identity, self.key, trust_unsigned=self.trust_unsigned
        )
        return await self.sessions.adopt(value, owner)


# -------------------------------------------------------------------------------------------------
# Idempotency keys: work that comes twice under one key, from one owner, is done once.

NO_MORE = "what was done under this key is not in the log any more"


class KeyInUse(RequestError):
    """The first request under this key is still being accepted."""

    code = "key_in_use"
    message = "the same idempotency_key is being accepted"
    param = "idempotency_key"


class IdempotencyKeys:
    """The requests that have a key. Belongs to the async engine's event loop."""

    def __init__(
        self, async_engine: AsyncEngine, sessions: Sessions, holding: Holding | None = None
    ) -> None:
        self._async_engine, self._sessions = async_engine, sessions
        self._holding = holding
        self._in_use: set[tuple[str, str]] = set()
        self._releasing: set[asyncio.Task[None]] = set()

    async def find(self, owner: str, key: str) -> Keyed | None:
        """What has been done under ``key``. Raises `KeyInUse` while that is not yet known."""
        if (owner, key) in self._in_use:
            raise KeyInUse
        found = await self._async_engine.ask_store(lambda store: store.find_key(owner, key))
        if found is not None and found.is_append and found.finished is None:
            # An append that a crash interrupted is parked, and no client can resume it.
            await self._sessions.continue_unattended(found.session, owner)
        return found

    async def submit_once(self, request: Request, sink: Sink) -> Keyed | None:
        """Submits a request that has a key, unless its work has been done: returns that then."""
        assert request.key is not None
        key = (request.owner, request.key)
        found = await self.find(*key)
        if found is not None:
            return found
        if key in self._in_use:
            raise KeyInUse
        self._in_use.add(key)
        was_cancelled = False
        try:
            return await self._submit_first(key, request, sink)
        except asyncio.CancelledError:
            was_cancelled = True
            raise
        finally:
            releasing = asyncio.ensure_future(self._release(key, was_cancelled))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)
            await asyncio.shield(releasing)

    async def resume(self, owner: str, found: Keyed, request_id: str, sink: Sink) -> Resumed:
        """Makes ``sink`` the reader of a generation that began under a key: see `Sessions.resume`.

        One that has finished is read from the log, whatever its session does now. Raises
        `HistoryGone` where its events are not in the log any more.
        """
        sessions = self._sessions
        if found.finished is None:
            cursor = Cursor(found.first_seq)
            resumed = await sessions.resume(found.session, owner, cursor, request_id, sink, False)
            if resumed.reset is not None:
                raise HistoryGone(NO_MORE)
            return resumed
        await sessions.read(found.session, owner, found.first_seq, 1)
        end, info = found.finished, await sessions.info(found.session, owner)
        then = replace(info, seq=end.seq, position=end.position, busy=False, parked=False)
        return Resumed(then, found.first_seq, None)

    async def _submit_first(
        self, key: tuple[str, str], request: Request, sink: Sink
    ) -> Keyed | None:
        """Submits ``request`` unless another replica has accepted one under its key."""
        if self._holding is None:
            await self._sessions.submit(request, sink)
            return None
        if not await self._holding.claim_key(*key):
            raise KeyInUse
        found = await self._async_engine.ask_store(lambda store: store.find_key(*key))
        if found is None:
            await self._sessions.submit(request, sink)
        return found

    async def _release(self, key: tuple[str, str], was_cancelled: bool) -> None:
        """Frees the key: what came under it is in the log, or will never be.

        ``was_cancelled``: the engine may still hold the request in its command queue.
        """
        try:
            if was_cancelled:
                await self._async_engine.settled()
            if self._holding is not None:
                await self._holding.release_key(*key)
        finally:
            self._in_use.discard(key)
