"""Bounds on what a peer may make the server hold: connections, bytes and time of a body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.auth.middleware import OPEN_PATHS, SUBPROTOCOL
from server.api.errors import (
    BodyTooLarge,
    RequestTimeout,
    TooManyConnections,
    UnsupportedEncoding,
)
from server.api.middleware.connections import EXTENSION, ConnectionTable, address_of
from server.api.middleware.refuse import close_websocket, refuse

BODY_TIMEOUT_S = 8.0


class ConnectionLimit:
    """Admits requests and sockets as far as ``table`` allows; the excess is told so.

    `/health` and `/ready` always answer: an overload must not look like a death.
    """

    def __init__(self, app: ASGIApp, table: ConnectionTable) -> None:
        self._app, self._table = app, table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        address = address_of(client[0] if client else "")
        connection = scope.get("extensions", {}).get(EXTENSION)
        if not self._table.admit(address, connection):
            await _refuse_connection(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._table.release(address, connection)


class BodyLimit:
    """Makes reading a body raise `BodyTooLarge` or `RequestTimeout`; the app answers with them.

    ``of_paths`` has the paths that take bodies of another size.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        timeout_s: float = BODY_TIMEOUT_S,
        of_paths: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._of_paths = of_paths or {}
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            await refuse(scope, receive, send, UnsupportedEncoding())
            return
        declared = headers.get("content-length", "0")
        of_path = self._of_paths.get(scope["path"])
        max_bytes = self._max_bytes if of_path is None else of_path()
        if int(declared) > max_bytes:
            await refuse(scope, receive, send, BodyTooLarge(max_bytes))
            return
        await self._app(scope, self._bounded(receive, max_bytes), send)

    def _bounded(self, receive: Receive, max_bytes: int) -> Receive:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        num_bytes = 0
        complete = False

        async def bounded() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout from None
            num_bytes += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if num_bytes > max_bytes:
                raise BodyTooLarge(max_bytes)
            return message

        return bounded


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        offered = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        await close_websocket(receive, send, 1013, "too many connections", offered)
    else:
        await refuse(scope, receive, send, TooManyConnections())
