"""Sessions that the engine does not have, and gets: from the store, or from another replica."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, get_args

from server.engine.value import Past
from server.errors import RequestError, SessionNotFound
from server.runtime.async_engine import AsyncEngine
from server.runtime.engine_thread import EngineLike
from server.sessions.ownership import Handover, Ownership
from server.store.base import Loaded
from server.store.errors import OwnedElsewhere, SnapshotMismatch, StoreFailed

#: A session that many replicas want may have gone on before this one gets it.
MAX_MOVES = 3

R = TypeVar("R")

#: Whose a session is in the store of another version of the model; it may block.
Elsewhere = Callable[[str], str | None]


class OtherVersion(SnapshotMismatch):
    """The session was made by another version of its model."""

    def __init__(self) -> None:
        super().__init__(
            "the session belongs to another version of the model; it is kept, and goes on where "
            "that version is served",
            "session",
        )


class SessionLoader:
    """Each session once at a time, however many want it."""

    def __init__(
        self, async_engine: AsyncEngine, elsewhere: Elsewhere | None, ownership: Ownership | None
    ) -> None:
        self._async_engine, self._elsewhere, self._ownership = async_engine, elsewhere, ownership
        self._running: dict[tuple[str, str, Handover], asyncio.Future[None]] = {}

    async def use(
        self, session: str, owner: str, use: Callable[[], Awaitable[R]], handover: Handover = "ask"
    ) -> R:
        """What ``use`` gives, with the session fetched first where the engine does not have it.

        It may leave again before it is used: for others that want its room, or another
        replica, or because the store has failed. Only the store knows that there is none.
        """
        for _ in range(MAX_MOVES):
            try:
                return await use()
            except SessionNotFound:
                await self._join(session, owner, handover)
        try:
            return await use()
        except SessionNotFound:
            raise StoreFailed("the session comes and goes; try again") from None

    async def past(self, session: str, owner: str, at: int) -> Past:
        """The session as it was when its text had ``at`` tokens."""
        try:
            loaded = await self._load(session, owner, at)
        except OwnedElsewhere:
            await self._join(session, owner, "ask")
            loaded = await self._load(session, owner, at)
        return Past(loaded.value, loaded.entries, at)

    async def is_here(self, session: str, owner: str) -> bool:
        """Whether the engine has the session."""
        try:
            await self._async_engine.call(
                lambda engine, now: engine.session_info(session, owner, now)
            )
        except SessionNotFound:
            return False
        return True

    def is_loading(self, session: str, owner: str) -> bool:
        """Whether the session may be in the engine in a moment."""
        return bool(self._of(session, owner))

    async def ended(self, session: str, owner: str) -> None:
        """Returns when nobody here is about to have the session in the engine."""
        while running := self._of(session, owner):
            await asyncio.wait(running)

    def _of(self, session: str, owner: str) -> list[asyncio.Future[None]]:
        keys = ((session, owner, handover) for handover in get_args(Handover))
        return [self._running[key] for key in keys if key in self._running]

    async def _join(self, session: str, owner: str, handover: Handover) -> None:
        key = (session, owner, handover)
        while key not in self._running and (others := self._of(session, owner)):
            await asyncio.wait(others)
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.ensure_future(self._restore(*key))
            running.add_done_callback(lambda done: self._done(key, done))
        await asyncio.shield(running)

    def _done(self, key: tuple[str, str, Handover], done: asyncio.Future[None]) -> None:
        del self._running[key]
        if not done.cancelled():
            done.exception()  # those who waited have it

    async def _restore(self, session: str, owner: str, handover: Handover) -> None:
        self._async_engine.check_retirement()
        generation = self._async_engine.generation
        try:
            loaded, moved = await self._loaded(session, owner, handover)
        except SessionNotFound:
            await self.check_elsewhere(session, owner)
            raise
        past = Past(loaded.value, loaded.entries)

        def restore(engine: EngineLike, now: float) -> None:
            if self._async_engine.generation != generation:  # the store has let go of what it had
                raise StoreFailed("the session store failed just now; try again")
            engine.restore(past, now)
            if moved:  # what it ran, it ran a moment ago
                engine.go_on(session, owner)

        try:
            await self._async_engine.call(restore, work=True)
        except RequestError:
            if self._ownership is not None and not await self.is_here(session, owner):
                await self._ownership.release(session)  # another replica may have room
            raise

    async def _loaded(self, session: str, owner: str, handover: Handover) -> tuple[Loaded, bool]:
        """What the store has, and whether another replica had it until now."""
        moved = False
        for _ in range(MAX_MOVES):
            try:
                return await self._load(session, owner), moved
            except OwnedElsewhere as away:
                if self._ownership is None or handover == "never":
                    raise
                await self._ownership.acquire(session, owner, away.replica, handover)
                moved = True
        return await self._load(session, owner), moved

    async def _load(self, session: str, owner: str, at: int | None = None) -> Loaded:
        return await self._async_engine.ask_store(lambda store: store.load(session, owner, at))

    async def check_elsewhere(self, session: str, owner: str) -> None:
        """Raises `OtherVersion` where ``owner`` has the session in another version's store."""
        if self._elsewhere is None:
            return
        if await asyncio.to_thread(self._elsewhere, session) == owner:
            raise OtherVersion
