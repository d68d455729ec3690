"""Which names a server answers to: without keys, only those that an attacker cannot point at it.

DNS rebinding: a page of evil.example lets its name point to 127.0.0.1 and asks this server as
its own origin. A browser sends the name as the Host, so the Host shows it.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Scope

from server.api.errors import ForeignHost

logger = logging.getLogger("everstream.connections")

#: Probes come by any name, and learn a single word.
PROBES = frozenset({"/health", "/ready"})
#: What a proxy adds to the requests that it forwards.
OF_PROXIES = ("x-forwarded-for", "forwarded", "via")
#: Logged once: a proxy that does not forward the Host hides the names that are asked.
PROXY_WITHOUT_KEYS = (
    "a proxy forwards requests to this server, which has no keys: all that can reach the"
    " proxy may use it; set EVERSTREAM_API_KEYS (docs/operate/proxy.md)"
)


class HostCheck:
    """Knows the names that are ``allowed``, which may have ``*``: every name."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._saw_proxy = False

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises `ForeignHost` for a name other than those, localhost or an address."""
        if not self._saw_proxy and any(name in headers for name in OF_PROXIES):
            self._saw_proxy = True
            logger.warning(PROXY_WITHOUT_KEYS)
        name = name_of(headers.get("host", ""))
        is_ours = name == "localhost" or not {name, "*"}.isdisjoint(self._allowed)
        if not is_ours and not is_address(name) and scope["path"] not in PROBES:
            logger.warning("Host %r refused: a server without keys needs --allow-host", name)
            raise ForeignHost


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
