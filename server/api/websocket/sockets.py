"""The open sockets of a server, and the ASGI application that opens them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from server.api.auth.authenticator import REVOKED, SUBPROTOCOL
from server.api.auth.keyring import Caller
from server.api.streaming import writer_of
from server.api.websocket.socket import Socket, SocketCodec
from server.models.registry import Models

#: How a socket ends whose server stops.
DRAINING = (1012, "the server is draining")

#: Makes the codec of one socket.
MakeCodec = Callable[[Models, Caller, Socket], SocketCodec]


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
            socket.close(*DRAINING)
        if sockets:
            await asyncio.wait([socket.ended for socket in sockets], timeout=timeout_s)


class SocketEndpoint:
    """The ASGI application of a WebSocket route, whose sockets speak by ``make_codec``."""

    def __init__(self, models: Models, sockets: Sockets, make_codec: MakeCodec) -> None:
        self._models, self._sockets, self._make_codec = models, sockets, make_codec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope["state"]["caller"]
        offered = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        await receive()
        await send({"type": "websocket.accept", "subprotocol": offered})
        max_events = self._models.default.max_queued_events
        socket = Socket(max_events, receive, send, writer_of(scope))
        self._sockets.add(socket)
        try:
            if not self._models.takes_sockets:
                socket.close(*DRAINING)
            with caller.watched(lambda: socket.close(*REVOKED)):
                await socket.run(self._make_codec(self._models, caller, socket))
        finally:
            self._sockets.discard(socket)
            socket.ended.set_result(None)
