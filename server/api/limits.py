"""Bounds on what a peer may make the server hold: connections, bytes and time of a body."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.auth import OPEN_PATHS, SUBPROTOCOL
from server.api.errors import BodyTooLarge, RequestTimeout, TooManyConnections
from server.api.refuse import close_websocket, refuse

BODY_TIMEOUT_S = 8.0


class ConnectionLimit:
    """At most ``max_connections`` requests and sockets at once; the excess is told so.

    Of these at most ``max_per_address`` may come from one client, where it is given.
    `/health` and `/ready` always answer: an overload must not look like a death.
    """

    def __init__(
        self, app: ASGIApp, max_connections: int, max_per_address: int | None = None
    ) -> None:
        self._app = app
        self._max = max_connections
        self._max_per_address = max_per_address
        self._num_open = 0
        self._by_address: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        address = client_of(scope)
        if self._is_full(address):
            await _refuse_connection(scope, receive, send)
            return
        self._num_open += 1
        self._by_address[address] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _is_full(self, address: str) -> bool:
        bound = self._max_per_address
        at_bound = bound is not None and self._by_address[address] >= bound
        return at_bound or self._num_open >= self._max


def client_of(scope: Scope) -> str:
    """Where a peer comes from. Of IPv6 the network: whoever has one address has all of a /64."""
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:  # a Unix socket has no address
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.IPv6Network((address, 64), strict=False))


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
        declared = Headers(scope=scope).get("content-length", "0")
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
