"""The client's address behind proxies that the operator trusts: they say it in X-Forwarded-For.

Anybody else could write anything there, so from other peers the header is ignored.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send


class TrustedProxies:
    """Knows the addresses of ``networks``, each an address or a network such as 10.0.0.0/8."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]

    def __contains__(self, host: object) -> bool:
        address = _address(str(host))
        return address is not None and any(address in network for network in self._networks)

    def client_of(self, peer: str, forwarded_for: Iterable[str]) -> str:
        """The address that the first proxy was asked from, as the trusted ones say.

        Each proxy appends the address that it was asked from. What stands before an address
        that is not trusted may be invented, and does not count.
        """
        client = peer
        entries = [entry for value in forwarded_for for entry in value.split(",")]
        for entry in reversed(entries):
            address = _address(_without_port(entry.strip()))
            if client not in self or address is None:
                break
            client = str(address)
        return client


class Forwarded:
    """Pure ASGI: what comes through ``proxies`` has the address of its client."""

    def __init__(self, app: ASGIApp, proxies: TrustedProxies) -> None:
        self._app, self._proxies = app, proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if client and client[0] in self._proxies:
            values = Headers(scope=scope).getlist("x-forwarded-for")
            scope = {**scope, "client": (self._proxies.client_of(client[0], values), 0)}
        await self._app(scope, receive, send)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = None if isinstance(address, ipaddress.IPv4Address) else address.ipv4_mapped
    return mapped or address


def _without_port(entry: str) -> str:
    """Some proxies add the port, to an IPv6 address after brackets."""
    if entry.startswith("["):
        return entry[1:].partition("]")[0]
    return entry.partition(":")[0] if entry.count(":") == 1 else entry
