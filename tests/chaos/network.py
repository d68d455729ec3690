"""The wires between clients, replicas and the store, and how they are cut.

Each replica has two, so that one can be cut and not the other: to its clients and
to its store. As root they are links between network namespaces, and a cut takes
the link down; else they are proxies that forward nothing any more. Either way
no side is told: packets get lost, and connections stay half open.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

from tests.postgres import USER, Postgres
from tests.reliability.proxy import FaultProxy, proxied
from tests.reliability.servers import IN_NETWORK, LOCAL

Wire = Literal["clients", "store"]
Wires = Literal["namespaces", "proxies", "direct"]
WIRES: tuple[Wire, ...] = ("clients", "store")

#: Of the tests alone: /30 networks below it, one for each wire.
BLOCK = "10.83"


class Network(Protocol):
    """What a cluster asks of its wires. Replicas are counted from 0."""

    def host(self, replica: int) -> str:
        """The address that the replica listens on."""

    def port(self, replica: int) -> int:
        """The port that the replica listens on; 0: any that is reserved for it."""

    def within(self, replica: int) -> tuple[str, ...]:
        """The command that runs the replica where it is."""

    def store_url(self, replica: int, database: str) -> str:
        """The store as this replica reaches it."""

    async def address(self, replica: int, port: int) -> str:
        """``host:port`` at which clients reach the replica that listens on ``port``."""

    def cut(self, replica: int, wire: Wire) -> None: ...
    def repair(self, replica: int, wire: Wire) -> None: ...


class ReachablePostgres(Postgres):
    """Listens on the host's end of links, too."""

    def listen_also(self, addresses: list[str]) -> None:
        """Before `start`."""
        with (self._data / "postgresql.conf").open("a") as config:
            config.write(f"listen_addresses = '{','.join([LOCAL, *addresses])}'\n")
        with (self._data / "pg_hba.conf").open("a") as access:
            access.write(f"host all all {BLOCK}.0.0/16 trust\n")


# Namespaces


@dataclass(frozen=True)
class _Link:
    """A pair of interfaces: ``near`` on this side, ``far`` in the namespace."""

    near: str
    far: str
    near_address: str
    far_address: str


class Namespaces:
    """Replicas in network namespaces of their own."""

    def __init__(self, postgres: Postgres, num_replicas: int) -> None:
        self._postgres = postgres
        self._names = [f"everstream-{os.getpid()}-{index}" for index in range(num_replicas)]
        self._links: list[dict[Wire, _Link]] = [{} for _ in self._names]

    def open(self) -> None:
        free = _free_networks()
        for index, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            for wire in WIRES:
                link = _Link(f"es{os.getpid() % 10**7}{wire[0]}{index}", wire, *next(free))
                _ip(
                    "link",
                    "add",
                    link.near,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    link.far,
                    "netns",
                    name,
                )
                _ip("address", "add", f"{link.near_address}/30", "dev", link.near)
                _ip("link", "set", link.near, "up")
                _ip("-n", name, "address", "add", f"{link.far_address}/30", "dev", link.far)
                _ip("-n", name, "link", "set", link.far, "up")
                self._links[index][wire] = link

    def close(self) -> None:
        """The links go with their namespaces."""
        for name in self._names:
            with contextlib.suppress(RuntimeError):
                _ip("netns", "delete", name)

    @property
    def near_addresses(self) -> list[str]:
        """Where the store must listen."""
        return [links["store"].near_address for links in self._links]

    def host(self, replica: int) -> str:
        return self._links[replica]["clients"].far_address

    def port(self, replica: int) -> int:
        """In its namespace there is no other server."""
        return 8000

    def within(self, replica: int) -> tuple[str, ...]:
        return (*IN_NETWORK, self._names[replica])

    def store_url(self, replica: int, database: str) -> str:
        near = self._links[replica]["store"].near_address
        return f"postgresql://{USER}@{near}:{self._postgres.port}/{database}"

    async def address(self, replica: int, port: int) -> str:
        return f"{self.host(replica)}:{port}"

    def cut(self, replica: int, wire: Wire) -> None:
        """From the far side: on the near one packets still have a way, and get lost on it."""
        self._set(replica, wire, "down")

    def repair(self, replica: int, wire: Wire) -> None:
        self._set(replica, wire, "up")

    def _set(self, replica: int, wire: Wire, state: str) -> None:
        _ip("-n", self._names[replica], "link", "set", self._links[replica][wire].far, state)


def _free_networks() -> Iterator[tuple[str, str]]:
    """The two addresses of each /30 network that is free here."""
    taken = _ip("-o", "-4", "address")
    for number in itertools.count(os.getpid() * 16):  # another run begins elsewhere
        third, quarter = divmod(number % (1 << 14), 64)
        near, far = (f"{BLOCK}.{third}.{quarter * 4 + end}" for end in (1, 2))
        if f" {near}/" not in taken:
            yield near, far


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr}")
    return done.stdout


@cache
def can_have_namespaces() -> bool:
    """Whether this process may make network namespaces and links between them."""
    name = f"everstream-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except (RuntimeError, OSError):
        return False
    try:
        _ip(
            "link",
            "add",
            f"es{os.getpid() % 10**7}t",
            "type",
            "veth",
            "peer",
            "name",
            "t",
            "netns",
            name,
        )
    except RuntimeError:
        return False
    finally:
        _ip("netns", "delete", name)
    return True


# Proxies


class Proxies:
    """Replicas on the loopback, behind proxies, before a store behind proxies."""

    def __init__(self, stack: AsyncExitStack, to_store: list[FaultProxy]) -> None:
        self._stack, self._to_store = stack, to_store
        self._to_replica: dict[int, FaultProxy] = {}

    def host(self, replica: int) -> str:
        return LOCAL

    def port(self, replica: int) -> int:
        return 0

    def within(self, replica: int) -> tuple[str, ...]:
        return ()

    def store_url(self, replica: int, database: str) -> str:
        return f"postgresql://{USER}@{LOCAL}:{self._to_store[replica].port}/{database}"

    async def address(self, replica: int, port: int) -> str:
        """A replica keeps its port for good."""
        if replica not in self._to_replica:
            proxy = await self._stack.enter_async_context(proxied(port))
            self._to_replica[replica] = proxy
        return f"{LOCAL}:{self._to_replica[replica].port}"

    def cut(self, replica: int, wire: Wire) -> None:
        proxy = self._proxy(replica, wire)
        proxy.to_server.swallow()
        proxy.to_client.swallow()
        for link in proxy.links:
            link.swallow()

    def repair(self, replica: int, wire: Wire) -> None:
        """What was swallowed is lost, so that the connections that were cut end now."""
        proxy = self._proxy(replica, wire)
        for way in (proxy.to_server, proxy.to_client):
            way.swallow_after_bytes = None
        for link in proxy.links:
            if link.to_server.swallow_after_bytes is not None:
                link.cut()

    def _proxy(self, replica: int, wire: Wire) -> FaultProxy:
        return self._to_store[replica] if wire == "store" else self._to_replica[replica]


# Of any kind


class Direct:
    """Replicas on the loopback, with nothing in between that could be cut."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    def host(self, replica: int) -> str:
        return LOCAL

    def port(self, replica: int) -> int:
        return 0

    def within(self, replica: int) -> tuple[str, ...]:
        return ()

    def store_url(self, replica: int, database: str) -> str:
        return self._postgres.url(database)

    async def address(self, replica: int, port: int) -> str:
        return f"{LOCAL}:{port}"

    def cut(self, replica: int, wire: Wire) -> None:
        raise NotImplementedError

    def repair(self, replica: int, wire: Wire) -> None:
        raise NotImplementedError


@contextmanager
def namespaces(postgres: ReachablePostgres, num_replicas: int) -> Iterator[Namespaces]:
    """Links for as long as the block runs; the store listens at their near ends."""
    network = Namespaces(postgres, num_replicas)
    try:
        network.open()
        postgres.listen_also(network.near_addresses)
        yield network
    finally:
        network.close()


@asynccontextmanager
async def network_of(
    postgres: ReachablePostgres, num_replicas: int, wires: Wires | None = None
) -> AsyncIterator[Network]:
    """The wires of a cluster whose store has not been started; the best that can be had."""
    wires = wires or ("namespaces" if can_have_namespaces() else "proxies")
    if wires == "namespaces":
        with namespaces(postgres, num_replicas) as links:
            yield links
        return
    if wires == "direct":
        yield Direct(postgres)
        return
    async with AsyncExitStack() as stack:
        to_store = [
            await stack.enter_async_context(proxied(postgres.port)) for _ in range(num_replicas)
        ]
        yield Proxies(stack, to_store)
