"""Kept sessions wherever they are: in the engine, in the store, or at another replica.

A session that the engine does not have is loaded when it is wanted. All methods
belong to the async engine's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from server.engine.types import Finished, Request, SessionInfo, TokenEvent
from server.engine.value import Past, SessionValue
from server.errors import InvalidRequest, RequestError, SessionNotFound
from server.runtime.arrival import Absent
from server.runtime.async_engine import AsyncEngine
from server.runtime.engine_thread import EngineLike
from server.runtime.request_registry import Sink
from server.sessions.loader import Elsewhere, LoadedSession, SessionLoader
from server.sessions.named_states import NamedStates, StateNotFound
from server.sessions.ownership import AttachedElsewhere, Handover, Ownership
from server.sessions.prefix_tier import PrefixTier
from server.sessions.quota import within_quota
from server.sessions.resume import (
    PAGE_EVENTS,
    Cursor,
    Page,
    Resumed,
    read_page,
    renamed,
    resumed,
    resumed_elsewhere,
)
from server.store.base import Listed, Numbered
from server.store.errors import OwnedElsewhere, SessionBroken

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
        ownership: Ownership | None = None,
        states: NamedStates | None = None,
    ) -> None:
        self._async_engine, self._prefixes, self._ownership = async_engine, prefixes, ownership
        self._states = states
        self.loader = SessionLoader(async_engine, elsewhere, ownership)

    async def start(self, continues: bool = False) -> None:
        """After the async engine has started. ``continues``: what was left unfinished goes on."""
        if self._ownership is not None:
            await self._ownership.start(self, continues)
        if continues:
            await self.continue_unfinished()

    async def submit(self, request: Request, sink: Sink) -> None:
        """See `AsyncEngine.submit`; the session is loaded where the engine does not have it."""
        if request.keep or request.session is not None:
            num_new = int(request.session is None)
            await within_quota(
                self._async_engine, request.owner, num_new, lambda: self._submit(request, sink)
            )
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
        await self.loader.use(
            session,
            request.owner,
            lambda loaded: self._async_engine.submit(request, sink, arrival=loaded),
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
        return await within_quota(
            self._async_engine,
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
                if self._ownership is None or not await self.loader.is_here(session, owner):
                    await self.go_on(session, owner, "never")
            except OwnedElsewhere:
                continue  # another replica was quicker
            except RequestError as error:  # no reason not to serve the others
                logger.error("session %s does not continue: %s", session, error)

    async def go_on(self, session: str, owner: str, handover: Handover = "ask") -> None:
        """Lets what a session runs go on, without a reader."""

        def go_on(engine: EngineLike, now: float) -> None:
            self._async_engine.check_running(engine, owner, engine.num_starting(session, owner))
            engine.go_on(session, owner)

        await self._call(session, owner, go_on, handover)

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
            await self._call(session, owner, delete, "move")
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

        async def fork() -> list[SessionInfo]:
            self._async_engine.check_retirement()
            past = None if at is None else await self._past(session, owner, at)
            return await self._call(
                session,
                owner,
                lambda engine, now: engine.fork(session, owner, num, now, past),
                work=True,
            )

        return await within_quota(self._async_engine, owner, num, fork)

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
        return await within_quota(
            self._async_engine,
            owner,
            1,
            lambda: self._async_engine.call(
                lambda engine, now: engine.adopt(value, owner, now), work=True
            ),
        )

    # Resuming

    async def resume(
        self, session: str, owner: str, cursor: Cursor, request_id: str, sink: Sink, take_over: bool
    ) -> Resumed:
        """Makes ``sink`` the reader of the session, from ``cursor`` on.

        What the session runs is parked until the caller has sent what `missed`
        gives, and calls `AsyncEngine.caught_up`; its events come under ``request_id``.
        """
        page: Page | None = None

        async def attach(loaded: LoadedSession | None) -> SessionInfo | Absent:
            nonlocal page
            page = None if loaded is None else loaded.page
            return await self._async_engine.attach(
                session, owner, request_id, sink, take_over, loaded
            )

        handover: Handover = "take_over" if take_over else "ask"
        try:
            info = await self.loader.use(session, owner, attach, handover, cursor.last_seq)
            if page is None or page.after_seq != cursor.last_seq:
                # The store knows whether what the engine has is still the session.
                page = await self._async_engine.ask_store(
                    lambda store: read_page(store, session, owner, cursor.last_seq)
                )
        except SessionNotFound:
            reset = resumed_elsewhere(session, cursor, self._async_engine.epoch_name(0))
            if reset is None:
                raise
            self._async_engine.detach(request_id)
            return reset
        return resumed(info, cursor, self._async_engine.epoch_name(info.epoch), page)

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

    # Other replicas

    async def give(
        self, session: str, owner: str, handover: Handover
    ) -> SessionInfo | Absent | None:
        """See `server.sessions.ownership.Owned`."""
        while True:
            await self.loader.ended(session, owner)
            found = await self._async_engine.call_on(
                session, owner, lambda engine, now: engine.give(session, owner, handover, now)
            )
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
        """Raises `StoreError` where another replica may have gone on with the session."""
        if self._ownership is not None:
            await self.read(session, owner, MAX_SEQ, 1)

    async def _past(self, session: str, owner: str, at: int) -> Past:
        if at < 0:
            raise InvalidRequest("at: must be at least 0", "at")
        return await self.loader.past(session, owner, at)

    async def _call(
        self,
        session: str,
        owner: str,
        call: Callable[[EngineLike, float], R],
        handover: Handover = "ask",
        work: bool = False,
    ) -> R:
        """What ``call`` gives on the engine thread, with the session loaded first if need be."""
        return await self.loader.use(
            session,
            owner,
            lambda loaded: self._async_engine.call_on(session, owner, call, loaded, work=work),
            handover,
        )
