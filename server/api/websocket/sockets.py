"""The open sockets of a server, for its drain."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Socket(Protocol):
    """What the drain needs of a socket. ``ended`` is done when nothing more is sent on it."""

    ended: asyncio.Future[None]

    def close(self, code: int, reason: str) -> None:
        """Closes it after everything that waits for it."""


class Sockets:
    """Each socket is added when it opens, and taken out when it has ended."""

    def __init__(self) -> None:
        self._open: set[Socket] = set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, socket: Socket) -> None:
        self._open.add(socket)

    def discard(self, socket: Socket) -> None:
        self._open.discard(socket)

    async def close(self, timeout_s: float) -> None:
        """Ends every socket with 1012 after what its event queue holds, or gives up on it."""
        sockets = list(self._open)
        for socket in sockets:
            socket.close(1012, "the server is draining")
        if sockets:
            await asyncio.wait([socket.ended for socket in sockets], timeout=timeout_s)
