"""What is done to a cluster. Each fault is drawn from a seed, happens, and is mended."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.chaos.cluster import Cluster
from tests.chaos.network import WIRES, Wire
from tests.chaos.replicas import Replica

Kind = Literal[
    "kill",
    "kill all",
    "stop briefly",
    "stop past lease",
    "drain",
    "cut from store",
    "cut from all",
    "store killed",
    "store away",
    "store paused",
    "store empty",
]
KINDS: tuple[Kind, ...] = (
    "kill",
    "drain",
    "stop past lease",
    "cut from store",
    "store killed",
    "kill",
    "stop briefly",
    "cut from all",
    "store paused",
    "drain",
    "store away",
    "kill all",
    "store empty",
)


@dataclass(frozen=True)
class Fault:
    """``after_s`` it waits for the one before it to be over; it lasts ``lasts_s``."""

    kind: Kind
    after_s: float
    lasts_s: float
    replica: int

    def __str__(self) -> str:
        whom = (
            ""
            if self.kind.startswith("store") or self.kind == "kill all"
            else (f" of replica {self.replica + 1}")
        )
        return f"{self.kind}{whom} for {self.lasts_s:.1f} s"


def schedule(
    chance: random.Random, num_replicas: int, lease_s: float, kinds: Sequence[Kind] = KINDS
) -> Iterator[Fault]:
    """Faults without end: each kind comes once before any comes again."""
    while True:
        for kind in chance.sample(kinds, len(kinds)):
            yield Fault(
                kind,
                chance.uniform(0.5, 3.0),
                _duration(chance, kind, lease_s),
                chance.randrange(num_replicas),
            )


def _duration(chance: random.Random, kind: Kind, lease_s: float) -> float:
    if kind in ("kill", "kill all", "store killed", "store empty"):
        return chance.uniform(0.0, 2.0)
    if kind == "stop briefly":
        return chance.uniform(0.05, 0.5) * lease_s
    if kind in ("store paused", "store away"):
        return chance.uniform(0.3, 2.0) * lease_s
    if kind == "drain":
        return 0.0
    return lease_s + chance.uniform(1.0, 4.0)


class Injector:
    """Does faults to a cluster, one at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._work: dict[Kind, Callable[[Fault], Awaitable[None]]] = {
            "kill": lambda fault: self._kill(fault, [self._of(fault)]),
            "kill all": lambda fault: self._kill(fault, self._cluster.replicas),
            "stop briefly": self._stop,
            "stop past lease": self._stop,
            "drain": self._drain,
            "cut from store": lambda fault: self._cut(fault, ("store",)),
            "cut from all": lambda fault: self._cut(fault, WIRES),
            "store killed": self._kill_store,
            "store away": self._stop_store,
            "store paused": self._pause_store,
            "store empty": self._empty_store,
        }

    async def inject(self, fault: Fault) -> None:
        """Returns when it is mended; what it broke may still be broken."""
        await self._work[fault.kind](fault)

    def _of(self, fault: Fault) -> Replica:
        return self._cluster.replicas[fault.replica]

    def _strike(self, fault: Fault, replicas: Sequence[Replica]) -> None:
        self._cluster.strike(fault.kind, replicas)

    async def _kill(self, fault: Fault, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            replica.hold()
        self._strike(fault, replicas)
        for replica in replicas:
            replica.mean_to_end()
            replica.signal(signal.SIGKILL)
        await asyncio.sleep(fault.lasts_s)
        if len(replicas) > 1:
            self._cluster.over(fault.kind, True)
        for replica in replicas:
            replica.release()

    async def _stop(self, fault: Fault) -> None:
        replica = self._of(fault)
        self._strike(fault, [replica])
        replica.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            replica.signal(signal.SIGCONT)
            self._cluster.over(fault.kind, False)

    async def _drain(self, fault: Fault) -> None:
        """It ends by itself, and another one is started in its place."""
        replica = self._of(fault)
        if not replica.is_up:
            return
        num_exits = len(replica.exits)
        replica.mean_to_drain()
        replica.signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            await replica.ended(num_exits)

    async def _cut(self, fault: Fault, wires: Sequence[Wire]) -> None:
        network = self._cluster.network
        self._strike(fault, [self._of(fault)])
        for wire in wires:
            network.cut(fault.replica, wire)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            for wire in wires:
                network.mend(fault.replica, wire)
            self._cluster.over(fault.kind, False)

    async def _kill_store(self, fault: Fault) -> None:
        self._strike(fault, self._cluster.replicas)
        await asyncio.to_thread(self._cluster.postgres.kill)
        await self._start_store_again(fault)

    async def _stop_store(self, fault: Fault) -> None:
        self._strike(fault, self._cluster.replicas)
        await asyncio.to_thread(self._cluster.postgres.stop)
        await self._start_store_again(fault)

    async def _start_store_again(self, fault: Fault) -> None:
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            await asyncio.to_thread(self._cluster.postgres.start)
        self._cluster.over(fault.kind, True)

    async def _pause_store(self, fault: Fault) -> None:
        self._strike(fault, self._cluster.replicas)
        self._cluster.postgres.pause()
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            self._cluster.postgres.go_on()
        self._cluster.over(fault.kind, True)

    async def _empty_store(self, fault: Fault) -> None:
        self._strike(fault, self._cluster.replicas)
        await asyncio.to_thread(self._cluster.lose_store)
        self._cluster.over(fault.kind, True)
        await asyncio.sleep(fault.lasts_s)
