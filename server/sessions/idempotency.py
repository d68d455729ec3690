"""Idempotency keys: work that comes twice under one key, from one owner, is done once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from server.engine.types import Request
from server.errors import RequestError
from server.runtime.async_engine import AsyncEngine
from server.runtime.readers import Sink
from server.sessions.loader import Cursor, Holding, Resumed
from server.sessions.sessions import Sessions
from server.store.base import HistoryGone, Keyed

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
