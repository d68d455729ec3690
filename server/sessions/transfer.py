"""Sessions as files: signed on the way out, checked on the way in."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from server.engine.types import SessionInfo
from server.sessions.sessions import Sessions
from server.store.base import Identity
from server.store.portable import export_session, import_session


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
