"""Who calls: API keys, kept as hashes and compared in constant time, and allowed origins.

Pure ASGI, so that it protects WebSockets as well as HTTP.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ForeignOrigin, InvalidApiKey
from server.api.refuse import close_websocket, refuse
from server.engine.errors import EngineError

SUBPROTOCOL = "everstream.v1"
KEY_SUBPROTOCOL = "everstream.key."
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
OPEN_PREFIX = "/static/"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ANYONE = "anyone"


class Keyring:
    """The server's keys. Without keys everybody is the same owner."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def owner(self, key: str | None) -> str | None:
        """The owner that ``key`` speaks for, or None. Looks at every key, found or not."""
        if not self._hashes:
            return ANYONE
        wanted = hashlib.sha256((key or "").encode("utf-8", "surrogateescape")).digest()
        found = [hmac.compare_digest(wanted, known) for known in self._hashes]
        return wanted.hex() if any(found) else None


class AuthMiddleware:
    """Puts ``owner`` into the scope's state, or refuses: 403 Origin, 401 key."""

    def __init__(self, app: ASGIApp, keyring: Keyring, allowed_origins: Iterable[str]) -> None:
        self._app = app
        self._keyring = keyring
        self._allowed_origins = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_origin(scope, headers)
        except EngineError as error:
            await refuse(scope, receive, send, error)
            return
        owner = self._keyring.owner(_key(headers))
        if owner is None and not _is_open(scope):
            await _refuse_key(scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = owner
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


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    return scope["type"] == "http" and (path in OPEN_PATHS or path.startswith(OPEN_PREFIX))


def _key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return _subprotocol_key(headers)


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


async def _refuse_key(scope: Scope, receive: Receive, send: Send) -> None:
    """401; but to a browser's socket 1008, because a page cannot see the 401."""
    if scope["type"] == "websocket" and SUBPROTOCOL in scope["subprotocols"]:
        await close_websocket(receive, send, 1008, "wrong key", SUBPROTOCOL)
    else:
        await refuse(scope, receive, send, InvalidApiKey())
