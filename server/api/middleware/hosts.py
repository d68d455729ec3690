"""Which names a server answers to: without keys, only those that an attacker cannot point at it.

DNS rebinding: a page of evil.example lets its name point to 127.0.0.1 and asks this server as
its own origin. A browser sends the name as the Host, so the Host shows it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Scope

from server.api.errors import ForeignHost

#: Probes come by any name, and learn a single word.
PROBES = frozenset({"/health", "/ready"})


class HostCheck:
    """Knows the names that are ``allowed``, which may have ``*``: every name."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises `ForeignHost` for a name other than those, localhost or an address."""
        name = name_of(headers.get("host", ""))
        is_ours = name == "localhost" or not {name, "*"}.isdisjoint(self._allowed)
        if not is_ours and not is_address(name) and scope["path"] not in PROBES:
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
