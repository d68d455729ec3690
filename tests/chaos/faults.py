"""Faults that are injected into a cluster: each is drawn from a seed, injected and repaired."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tests.chaos.cluster import Cluster
from tests.chaos.network import WIRES, Wire
from tests.chaos.replicas import Replica
from tests.reliability.servers import STUCK_S

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

#: What happens to the store while something happens to a replica.
MEETS_OTHERS = ("store killed", "store away", "store paused")
#: How often a fault begins before the one before it is over.
OVERLAP_PROBABILITY = 0.4


@dataclass(frozen=True)
class Fault:
    """Begins ``after_s`` the end of the previous fault, or ``overlaps`` it; lasts ``lasts_s``."""

    kind: Kind
    after_s: float
    lasts_s: float
    replica: int
    overlaps: bool = False

    def __str__(self) -> str:
        target = f" of replica {self.replica + 1}" if self.is_of_one else ""
        return f"{'+ ' if self.overlaps else ''}{self.kind}{target} for {self.lasts_s:.1f} s"

    @property
    def is_of_one(self) -> bool:
        """Whether it strikes a single replica."""
        return not self.kind.startswith("store") and self.kind != "kill all"

    def may_overlap(self, other: Fault) -> bool:
        """Whether both leave somebody who can continue, now or when they are over."""
        if self.is_of_one and other.is_of_one:
            return self.replica != other.replica
        store = other if self.is_of_one else self
        return self.is_of_one != other.is_of_one and store.kind in MEETS_OTHERS


def schedule(
    chance: random.Random, num_replicas: int, lease_s: float, kinds: Sequence[Kind] = KINDS
) -> Iterator[Fault]:
    """Faults without end: each kind comes once before any comes again."""
    alone: Fault | None = None
    while True:
        for kind in chance.sample(kinds, len(kinds)):
            after_s, lasts_s = chance.uniform(0.5, 3.0), _duration(chance, kind, lease_s)
            fault = Fault(kind, after_s, lasts_s, chance.randrange(num_replicas))
            is_wanted = chance.random() < OVERLAP_PROBABILITY
            if alone is not None and is_wanted and fault.may_overlap(alone):
                yield replace(fault, after_s=chance.uniform(0.0, 1.0), overlaps=True)
                alone = None
            else:
                yield fault
                alone = fault


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
    """Does faults to a cluster."""

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
        """Returns when it is repaired; what it broke may still be broken."""
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
        async with asyncio.timeout(STUCK_S):
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
                network.repair(fault.replica, wire)
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
