"""Who calls: a key for every request, scopes by route, and allowed origins.

Pure ASGI, so that it protects WebSockets as well as HTTP.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.auth.keyring import Caller, Keyring
from server.api.auth.scopes import OPEN, ScopeMissing
from server.api.auth.scopes import Scope as Right
from server.api.auth.tenants import RateLimited
from server.api.errors import ForeignOrigin, InvalidApiKey, RouteNotFound
from server.api.middleware.refuse import close_websocket, refuse
from server.api.routes.route_table import RouteTable
from server.errors import RequestError

__all__ = ["OPEN_PATHS", "SUBPROTOCOL", "AuthMiddleware", "Keyring"]

SUBPROTOCOL = "everstream.v1"
KEY_SUBPROTOCOL = "everstream.key."
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
#: How an open socket ends whose key is taken out.
REVOKED = (1008, "the key was revoked")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class AuthMiddleware:
    """Puts ``caller`` and its ``owner`` into the scope's state, or refuses.

    403 for the origin, 401 for the key, 403 for its scopes, 429 for its tenant's
    limits. Where a path is open and no key is given, both are None.
    """

    def __init__(
        self, app: ASGIApp, keyring: Keyring, table: RouteTable, allowed_origins: Iterable[str]
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._table = table
        self._allowed_origins = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller = self._keyring.caller(_key(headers))
        state = scope.setdefault("state", {})
        state["caller"] = caller
        state["owner"] = None if caller is None else caller.tenant.name
        with ExitStack() as held:
            state["held"] = held
            try:
                self._check_origin(scope, headers)
                wanted = self._table.scopes_of(scope["type"], scope["path"])
                if wanted != [OPEN]:
                    held.enter_context(_admit(caller, wanted))
            except RequestError as error:
                await _refuse(scope, receive, send, error)
                return
            await self._app(scope, receive, send)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """A page of another origin must not use this server with its visitor's network."""
        if scope["type"] == "http" and scope["method"] in SAFE_METHODS:
            return
        origin = headers.get("origin")
        if origin is None or "*" in self._allowed_origins or origin in self._allowed_origins:
            return
        if origin.partition("://")[2].lower() != headers.get("host", "").lower():
            raise ForeignOrigin


def _admit(
    caller: Caller | None, wanted: Sequence[frozenset[Right]]
) -> AbstractContextManager[None]:
    """One of the tenant's connections, not yet taken. Any key sees the 404 of an unknown path."""
    if caller is None:
        raise InvalidApiKey
    for scopes in wanted:
        caller.require(*scopes)
    caller.tenant.request()
    if not wanted:
        raise RouteNotFound
    return caller.tenant.connection()


def _key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("api-key") or _subprotocol_key(headers)


def _subprotocol_key(headers: Headers) -> str | None:
    """The key that a browser offers as a subprotocol: it cannot set headers on a WebSocket."""
    for offered in headers.get("sec-websocket-protocol", "").split(","):
        name = offered.strip()
        if name.startswith(KEY_SUBPROTOCOL):
            text = name.removeprefix(KEY_SUBPROTOCOL)
            try:
                return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
            except (binascii.Error, ValueError):
                return None
    return None


#: How a browser's socket hears of it: a page cannot see the status of a refused handshake.
_CLOSES: tuple[tuple[type[RequestError], int, str], ...] = (
    (InvalidApiKey, 1008, "wrong key"),
    (ScopeMissing, 1008, "this key may not do that"),
    (RateLimited, 1013, "the limits of this key are reached"),
)


async def _refuse(scope: Scope, receive: Receive, send: Send, error: RequestError) -> None:
    if scope["type"] == "websocket" and SUBPROTOCOL in scope["subprotocols"]:
        for kind, code, reason in _CLOSES:
            if isinstance(error, kind):
                await close_websocket(receive, send, code, reason, SUBPROTOCOL)
                return
    await refuse(scope, receive, send, error)
