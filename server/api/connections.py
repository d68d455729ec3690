"""Every open connection, silent ones included, and which of them carry a request.

A bound on requests alone would let connections that send nothing take every
descriptor. Each connection counts from its accept to its end. When there is no
room for another one, the connection that has carried no request for the longest
time is closed.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import islice

#: The name of the extension in a scope that has the `OpenConnection`, or None.
CONNECTION_EXTENSION = "everstream.connection"
DEFAULT_MAX_CONNECTIONS = 4096
#: Connections beyond a bound, so that `/health` is answered and the excess gets an answer.
SPARE = 16
#: The address of all connections from trusted proxies.
PROXY = "proxy"
#: Idle connections among which one without unsent data is looked for.
MAX_LOOK = 16


@dataclass(eq=False, slots=True)
class OpenConnection:
    """One connection: `made` when it has a transport, `lost` when that has ended."""

    table: ConnectionTable
    address: str
    groups: Sequence[_Group]
    transport: asyncio.Transport | None = None
    is_open: bool = True

    def made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.table.mark_idle(self)

    def lost(self) -> None:
        """May be called again."""
        if self.is_open:
            self.is_open, self.transport = False, None
            self.table.remove(self)

    @property
    def has_unsent_data(self) -> bool:
        return self.transport is not None and self.transport.get_write_buffer_size() > 0


@dataclass(slots=True)
class _Group:
    """The connections of all, or of one address; ``idle`` is ordered, the longest idle first."""

    max_admitted: int
    num_admitted: int = 0
    num_open: int = 0
    idle: dict[OpenConnection, None] = field(default_factory=dict)

    @property
    def has_room(self) -> bool:
        return self.num_open < self.max_admitted + SPARE

    def longest_idle(self) -> OpenConnection | None:
        """The one to close first; one that still sends its last answer comes after others."""
        oldest = list(islice(self.idle, MAX_LOOK))
        silent = (each for each in oldest if not each.has_unsent_data)
        return next(silent, oldest[0] if oldest else None)


class ConnectionTable:
    """At most ``max_connections`` carry a request or are sockets; `SPARE` more may be open.

    The same holds for those of one client address with ``max_per_address``, where it
    is given. The connections of ``proxies`` have many clients, so there it holds for the
    requests of each. Belongs to one event loop.
    """

    def __init__(
        self,
        max_connections: int,
        max_per_address: int | None = None,
        proxies: Container[object] = (),
    ) -> None:
        self._max_per_address = max_connections if max_per_address is None else max_per_address
        self._proxies = proxies
        self._all = _Group(max_connections)
        self._by_address: dict[str, _Group] = {}

    @property
    def num_open(self) -> int:
        return self._all.num_open

    # Connections, as they are accepted

    @property
    def has_room(self) -> bool:
        """Whether another connection may be accepted."""
        return self._all.has_room

    def address_of_peer(self, host: str) -> str:
        """What a connection from ``host`` counts as."""
        return PROXY if host in self._proxies else address_of(host)

    def add(self, address: str) -> OpenConnection | None:
        """A connection that was accepted; None where its address has too many."""
        groups = self._groups(address)
        if not groups[1].has_room and not self._close_longest_idle(groups[1]):
            return None
        for group in groups:
            group.num_open += 1
        return OpenConnection(self, address, groups)

    def close_longest_idle(self) -> bool:
        """Closes one without a request; its descriptor is free in the event loop's next turn."""
        return self._close_longest_idle(self._all)

    def mark_idle(self, connection: OpenConnection) -> None:
        for group in connection.groups:
            group.idle[connection] = None

    def remove(self, connection: OpenConnection) -> None:
        for group in connection.groups:
            group.num_open -= 1
            group.idle.pop(connection, None)
        self._forget_unused(connection.address)

    # Requests

    def admit(self, address: str, connection: OpenConnection | None) -> bool:
        """Whether a request may begin; `release` ends it.

        ``connection`` is None behind a server that does not count its connections.
        """
        groups = self._groups(address)
        if any(group.num_admitted >= group.max_admitted for group in groups):
            self._forget_unused(address)
            return False
        for group in groups:
            group.num_admitted += 1
        if connection is not None:
            for group in connection.groups:
                group.idle.pop(connection, None)
        return True

    def release(self, address: str, connection: OpenConnection | None) -> None:
        for group in self._groups(address):
            group.num_admitted -= 1
        if connection is not None and connection.is_open:
            self.mark_idle(connection)
        self._forget_unused(address)

    def _groups(self, address: str) -> tuple[_Group, _Group]:
        """That of all connections, and that of one address."""
        num = self._all.max_admitted if address == PROXY else self._max_per_address
        return self._all, self._by_address.setdefault(address, _Group(num))

    def _forget_unused(self, address: str) -> None:
        group = self._by_address.get(address)
        if group is not None and not group.num_open and not group.num_admitted:
            del self._by_address[address]

    def _close_longest_idle(self, group: _Group) -> bool:
        connection = group.longest_idle()
        if connection is None or connection.transport is None:
            return False
        for each in connection.groups:
            each.idle.pop(connection, None)
        connection.transport.abort()
        return True


def address_of(host: str) -> str:
    """What a client at ``host`` counts as. Of IPv6 the network: one client has all of a /64."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a Unix socket has no address
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.IPv6Network((address, 64), strict=False))
