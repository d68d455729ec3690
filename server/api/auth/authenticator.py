"""Who calls: a key for every request, scopes by route, and allowed origins."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Iterable
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import Scope as AsgiScope

from server.api.auth.keyring import Keyring
from server.api.auth.scopes import OPEN, RouteTable
from server.api.errors import ForeignOrigin, InvalidApiKey, RouteNotFound

logger = logging.getLogger("everstream.connections")

SUBPROTOCOL = "everstream.v1"
KEY_SUBPROTOCOL = "everstream.key."
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
#: How an open socket ends whose key is taken out.
REVOKED = (1008, "the key was revoked")
#: Of an origin or a host in a line of the log.
MAX_LOGGED_CHARS = 200
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Authenticator:
    """Finds the caller of a request, and admits it by the scopes of its route."""

    def __init__(self, keyring: Keyring, table: RouteTable, allowed_origins: Iterable[str]) -> None:
        self._keyring = keyring
        self._table = table
        self._allowed_origins = frozenset(allowed_origins)

    def admit(self, scope: AsgiScope, headers: Headers, held: ExitStack) -> None:
        """Puts ``caller`` and its ``owner`` into the scope's state, or raises.

        `ForeignOrigin`, `InvalidApiKey`, `ScopeMissing`, or `RateLimited` by its tenant's limits.
        One of the tenant's connections is ``held``. Where a path is open and no key is given, both
        are None.
        """
        caller = self._keyring.caller(_key(headers))
        state = scope["state"]
        state["caller"] = caller
        state["owner"] = None if caller is None else caller.tenant.name
        self._check_origin(scope, headers)
        wanted = self._table.scopes_of(scope["type"], scope["path"])
        if wanted != [OPEN]:
            if caller is None:
                raise InvalidApiKey
            for scopes in wanted:
                caller.require(*scopes)
            caller.tenant.request()
            if not wanted:  # any key sees the 404 of an unknown path
                raise RouteNotFound.at(scope["path"])
            held.enter_context(caller.tenant.connection())

    def _check_origin(self, scope: AsgiScope, headers: Headers) -> None:
        """A page of another origin must not use this server with its visitor's network."""
        if scope["type"] == "http" and scope["method"] in SAFE_METHODS:
            return
        origin = headers.get("origin")
        if origin is None or "*" in self._allowed_origins or origin in self._allowed_origins:
            return
        host = headers.get("host", "")
        if origin.partition("://")[2].lower() != host.lower():
            logger.warning(
                "origin %r refused, Host is %r: see --allow-origin; a proxy must forward the Host",
                origin[:MAX_LOGGED_CHARS],
                host[:MAX_LOGGED_CHARS],
            )
            raise ForeignOrigin


def _key(headers: Headers) -> str | None:
    """The key in a header; or that of a browser, which cannot set headers on a WebSocket."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    if api_key := headers.get("api-key"):
        return api_key
    for offered in headers.get("sec-websocket-protocol", "").split(","):
        name = offered.strip()
        if name.startswith(KEY_SUBPROTOCOL):
            text = name.removeprefix(KEY_SUBPROTOCOL)
            try:
                return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
            except (binascii.Error, ValueError):
                return None
    return None
