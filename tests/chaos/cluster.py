"""Three replicas, their store and the wires between them, while a block runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.network import Network, ReachablePostgres, Wires, network_of
from tests.chaos.replicas import Replica
from tests.reliability.servers import EVERSTREAM

DATABASE = "everstream"
#: The shortest that the server takes.
LEASE_S = 3.0
START_S = 150.0


@dataclass
class Cluster:
    """``lost_databases`` are the stores that were replaced by empty ones, oldest first."""

    postgres: ReachablePostgres
    network: Network
    replicas: list[Replica]
    lost_databases: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    on_strike: Callable[[str, Sequence[Replica]], None] = lambda kind, replicas: None
    on_over: Callable[[str, bool], None] = lambda kind, was_all: None
    on_loss: Callable[[], None] = lambda: None

    def strike(self, kind: str, replicas: Sequence[Replica]) -> None:
        self.on_strike(kind, replicas)

    def over(self, kind: str, was_all: bool) -> None:
        """``was_all``: until now no replica could continue."""
        self.on_over(kind, was_all)

    def lose_store(self) -> None:
        """An empty database takes the place of the present one, which is kept for the check.

        Blocking.
        """
        kept = f"lost_{len(self.lost_databases)}"
        self.on_loss()
        postgres = self.postgres
        postgres.psql(f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS false")
        postgres.psql(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            f" WHERE datname = '{DATABASE}'"
        )
        postgres.psql(f"ALTER DATABASE {DATABASE} RENAME TO {kept}")
        self.lost_databases.append(kept)
        postgres.psql(f"CREATE DATABASE {DATABASE} STRATEGY wal_log")
        self.on_loss()  # what began meanwhile was lost as well
        postgres.psql(f"ALTER DATABASE {kept} ALLOW_CONNECTIONS true")

    async def all_up(self, start_s: float) -> None:
        """Returns when each replica has taken work once.

        Raises `TimeoutError` with what is known of those that are not up.
        """
        try:
            async with asyncio.timeout(start_s):
                await asyncio.gather(*(replica.up() for replica in self.replicas))
        except TimeoutError:
            reports = [replica.report() for replica in self.replicas if not replica.is_up]
            raise TimeoutError("\n".join([f"not up after {start_s:g} s", *reports])) from None

    def urls(self) -> list[str]:
        return [f"http://{replica.url}" for replica in self.replicas]


@asynccontextmanager
async def cluster_of(
    model: Path,
    seed: object = 0,
    num_replicas: int = 3,
    wires: Wires | None = None,
    environment: dict[str, str] | None = None,
    program: tuple[str, ...] = EVERSTREAM,
    start_s: float = START_S,
) -> AsyncIterator[Cluster]:
    """A cluster that has started; everything of it has ended after the block."""
    postgres = ReachablePostgres()
    variables = {
        "EVERSTREAM_STORE_LEASE_S": str(LEASE_S),
        "EVERSTREAM_MAX_QUEUED_EVENTS": "32",
        "EVERSTREAM_SAVE_INTERVAL_TOKENS": "64",
        **(environment or {}),
    }
    try:
        async with network_of(postgres, num_replicas, wires) as network:
            await asyncio.to_thread(postgres.start)
            postgres.psql(f"CREATE DATABASE {DATABASE} STRATEGY wal_log")
            replicas = [
                Replica(
                    *(index, network, DATABASE, model, variables),
                    random.Random(f"{seed} {index}"),
                    program,
                )
                for index in range(num_replicas)
            ]
            cluster = Cluster(postgres, network, replicas, [], environment or {})
            runs = [asyncio.create_task(replica.run()) for replica in replicas]
            try:
                await _unless_over(cluster.all_up(start_s), runs)
                yield cluster
            finally:
                for run in runs:
                    run.cancel()
                await asyncio.gather(*runs, return_exceptions=True)
    finally:
        await asyncio.to_thread(postgres.close)


async def _unless_over(starting: Coroutine[Any, Any, None], runs: list[asyncio.Task[None]]) -> None:
    """Waits for the start, or raises what ended a replica's keeper."""
    start = asyncio.create_task(starting)
    done, _ = await asyncio.wait([start, *runs], return_when=asyncio.FIRST_COMPLETED)
    if start not in done:
        start.cancel()
    for one in done:
        one.result()
