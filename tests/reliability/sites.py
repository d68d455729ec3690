"""Where scenarios run that must hold for one server and for replicas: the fixture `site`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from tests.chaos.cluster import Cluster, cluster_of
from tests.chaos.logs import logs_of
from tests.chosen_model import served_model
from tests.reliability.history import Log
from tests.reliability.servers import ServerProcess
from tests.reliability.streams import End, KeptStream, log_of_store, run_all
from tests.stopping import stop
from tests.waiting import eventually

#: Above the interval in which a holder shows that it lives.
LEASE = {"EVERSTREAM_STORE_LEASE_S": "4"}


class Site(Protocol):
    """A tiny model served with a store. Clients may ask any of ``servers``.

    ``survivors`` are those that answer after the first one has crashed, and
    ``ends_of_taken`` how a connection may end whose session another one takes over.
    """

    model: Path
    servers: tuple[ServerProcess, ...]
    survivors: tuple[ServerProcess, ...]
    ends_of_taken: frozenset[End]

    async def crash(self) -> None:
        """Kills the first server; returns when ``survivors`` take work."""

    async def repair(self) -> None:
        """Returns when all ``servers`` take work again after a `crash`."""

    async def stop_first(self) -> ServerProcess:
        """Stops the first server past its lease; returns one that takes over."""

    async def wake_first(self) -> int | None:
        """Lets the stopped server continue, and returns its exit status."""

    async def take_store(self) -> None:
        """The store is away until `return_store`."""

    async def return_store(self) -> None: ...

    async def empty_store(self) -> None:
        """An empty store takes the place of the present one."""

    async def log(self) -> Log:
        """Ends the servers, and reads what every store has."""


class OneServer:
    """A server with a store in a folder; after a crash it is started again."""

    ends_of_taken: frozenset[End] = frozenset({"error"})

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = model
        self._store, self._away = folder / "store", folder / "away"
        flags = ("--model", model, "--store", self._store)
        self._first, self._second = (ServerProcess(*flags, environment=LEASE) for _ in range(2))
        self.servers: tuple[ServerProcess, ...] = (self._first,)
        self.survivors: tuple[ServerProcess, ...] = self.servers

    async def start(self) -> None:
        await asyncio.to_thread(self._first.start)

    def close(self) -> None:
        self._first.close()
        self._second.close()

    async def crash(self) -> None:
        await asyncio.to_thread(self._first.restart)

    async def repair(self) -> None:
        pass

    async def stop_first(self) -> ServerProcess:
        await pause(self._first, within_a_commit=False)
        await asyncio.to_thread(self._second.start)
        return self._second

    async def wake_first(self) -> int | None:
        self._first.go_on()
        return await asyncio.to_thread(self._first.wait)

    async def take_store(self) -> None:
        self._store.rename(self._away)

    async def return_store(self) -> None:
        assert not self._store.exists(), "the server has made another store"
        self._away.rename(self._store)

    async def empty_store(self) -> None:
        self._store.rename(self._away)
        self._store.mkdir()

    async def log(self) -> Log:
        for server in (self._first, self._second):
            if server.runs:
                assert await asyncio.to_thread(server.stop) == 0
        lost = log_of_store(self._away, self.model) if self._away.exists() else {}
        return {**lost, **log_of_store(self._store, self.model)}


class Replicas:
    """Three servers on one PostgreSQL; after a crash the others continue."""

    ends_of_taken: frozenset[End] = frozenset({"error", "migrate"})

    def __init__(self, cluster: Cluster, model: Path) -> None:
        self.model = model
        self.servers = tuple(replica.process for replica in cluster.replicas)
        self.survivors = self.servers[1:]
        self._cluster, self._first = cluster, cluster.replicas[0]

    async def crash(self) -> None:
        num_exits = len(self._first.exits)
        self._first.hold()
        self._first.signal(signal.SIGKILL)
        await self._first.ended(num_exits)

    async def repair(self) -> None:
        self._first.release()
        await self._first.up()

    async def stop_first(self) -> ServerProcess:
        self._first.hold()
        stop(self._first.process.pid)
        return self.survivors[0]

    async def wake_first(self) -> int | None:
        self._first.signal(signal.SIGCONT)
        await self._first.ended(0)
        return self._first.exits[0].code

    async def take_store(self) -> None:
        await asyncio.to_thread(self._cluster.postgres.kill)

    async def return_store(self) -> None:
        await asyncio.to_thread(self._cluster.postgres.start)

    async def empty_store(self) -> None:
        await asyncio.to_thread(self._cluster.lose_store)

    async def log(self) -> Log:
        return {**await logs_of(self._cluster, self.model)}


@asynccontextmanager
async def site_of(kind: str, folder: Path) -> AsyncIterator[Site]:
    """A "server" or "replicas" that take work; all of them have ended after the block."""
    model = served_model(folder / "model")
    if kind == "replicas":
        async with cluster_of(model, wires="direct") as cluster:
            yield Replicas(cluster, model)
        return
    site = OneServer(folder, model)
    try:
        await site.start()
        yield site
    finally:
        site.close()


async def run_spread(site: Site, streams: Sequence[KeptStream]) -> None:
    """Half of them at each of two servers where there are two, until each connection has ended."""
    first, second = site.servers[0], site.servers[-1]
    await asyncio.gather(
        run_all(streams[::2], first.stream_url), run_all(streams[1::2], second.stream_url)
    )


async def all_ready(site: Site) -> None:
    """Returns when each server takes work. Raises `TimeoutError`."""
    await eventually(lambda: all(server.takes_work() for server in site.servers))


# A server that is stopped at a chosen moment


def is_committing(pid: int) -> bool:
    """Whether the process has a lock that SQLite takes for a transaction: bytes 120 to 127."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(
        kind == "POSIX" and int(holder) == pid and 120 <= int(first) <= 127
        for _, kind, _, _, holder, _, first, _ in (lock for lock in locks if len(lock) == 8)
    )


def is_stopped(pid: int) -> bool:
    """Whether all of its threads stand still."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)


async def pause(server: ServerProcess, within_a_commit: bool) -> None:
    """Stops it, within a commit or where another process can write."""
    while True:
        server.pause()
        await eventually(lambda: is_stopped(server.pid))
        if is_committing(server.pid) == within_a_commit:
            return
        server.go_on()
        await asyncio.sleep(0.001)
