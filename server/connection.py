"""What the two protocols of the server share: how they read, write and refuse."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from server.api.connections import EXTENSION as CONNECTION
from server.api.connections import OpenConnection
from server.api.errors import error_body
from server.api.shortcut import EXTENSION as SHORTCUT
from server.api.shortcut import Write
from server.engine.errors import InvalidRequest

# Of one connection in one turn of the event loop: hundreds of tiny frames, ten milliseconds.
READ_BYTES = 4 * 1024


class ReadsLittle(asyncio.BufferedProtocol):
    """Takes `READ_BYTES` at a time: asyncio's own 256 KiB can be 40,000 frames.

    All connections read into one buffer, one after the other: what is in it is
    taken out before the event loop reads again.
    """

    _read_buffer = memoryview(bytearray(READ_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._read_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        raise NotImplementedError


class CountedProtocol(asyncio.BaseProtocol):
    """Tells ``connection`` when it begins and ends; None where nobody counts connections."""

    connection: OpenConnection | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.connection is not None:
            self.connection.made(cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.connection is not None:
            self.connection.lost()
        super().connection_lost(exc)


class RunsApp(CountedProtocol):
    """Wraps the app that uvicorn sets and calls.

    The app gets a copy of its scope, so that nothing refers in a circle to the
    protocol, and a connection's memory is free as soon as it ends.
    """

    _app: Any

    @property
    def app(self) -> Any:
        return self._run_app

    @app.setter
    def app(self, app: Any) -> None:
        self._app = app

    async def _run_app(self, scope: Any, receive: Any, send: Any) -> None:
        offered = {SHORTCUT: self._shortcut(scope), CONNECTION: self.connection}
        extensions = {**scope.get("extensions", {}), **offered}
        await self._app({**scope, "extensions": extensions}, receive, send)

    def _shortcut(self, scope: Any) -> Write:
        raise NotImplementedError


def refusal(message: str) -> bytes:
    """A whole answer with status 400, after which the connection ends."""
    body = error_body(InvalidRequest(message))
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
    return b"HTTP/1.1 400 Bad Request\r\n%b\r\n\r\n%b" % (head.encode(), body)
