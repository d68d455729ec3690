"""Which names a server answers to: without keys, only those that an attacker cannot point at it.

DNS rebinding: a page of evil.example lets its name point to 127.0.0.1 and asks this server as
its own origin. A browser sends the name as the Host, so the Host shows it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ForeignHost
from server.api.middleware.refuse import refuse

#: Probes come by any name, and learn a single word.
PROBES = frozenset({"/health", "/ready"})


class HostCheck:
    """Refuses with 403 what was asked of a name other than ``allowed``, localhost or an address.

    ``allowed`` may have ``*``, which is every name.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] in ("http", "websocket") and scope["path"] not in PROBES
        if is_request and not self._answers_to(Headers(scope=scope).get("host", "")):
            await refuse(scope, receive, send, ForeignHost())
            return
        await self._app(scope, receive, send)

    def _answers_to(self, host: str) -> bool:
        name = name_of(host)
        return name == "localhost" or not {name, "*"}.isdisjoint(self._allowed) or is_address(name)


def name_of(host: str) -> str:
    """The name in a well-formed Host, without its port and its last dot."""
    name = host if host.endswith("]") else host.rpartition(":")[0] if ":" in host else host
    return name.removesuffix(".").lower()


def is_address(name: str) -> bool:
    """Whether it is an IP address, which no name server can change."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
