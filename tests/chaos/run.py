"""One run: clients, faults from a seed, and the check of everything that was seen."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import checker
from tests.chaos.clients import Client, Reader, World
from tests.chaos.cluster import LEASE_S, Cluster, cluster_of
from tests.chaos.faults import KINDS, Fault, Injector, Kind, schedule
from tests.chaos.logs import lost_and_present
from tests.chaos.network import Wires
from tests.chaos.record import Recording
from tests.chaos.replicas import Exit, Replica
from tests.chaos.scripts import expected_events, scripts_of
from tests.chaos.sockets import SocketReader
from tests.chaos.sse import SseReader
from tests.chaos.waits import Waits
from tests.reliability.history import Problem
from tests.reliability.servers import DRAFTING, EVERSTREAM
from tests.tiny import BOUNDED, write_model
from tests.waiting import eventually

#: After the last fault every session must come to its end within this.
FINISH_S = 180.0


@dataclass(frozen=True)
class Plan:
    """A run is drawn from ``seed``; faults begin for ``seconds``, then all clients finish."""

    seed: int
    seconds: float
    num_clients: int = 24
    num_scripts: int = 12
    longest: int = 600
    kinds: Sequence[Kind] = KINDS
    max_faults: int | None = None
    wires: Wires | None = None
    attention: str = "gated"
    #: A checkpoint in the place of a tiny model.
    model: Path | None = None
    drafts: bool = False


@dataclass
class Verdict:
    """What came of a run. ``problems`` is empty where every promise was kept."""

    plan: Plan
    network: str
    faults: list[tuple[float, Fault]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    odd_ends: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    waits: Waits = field(default_factory=Waits)
    counts: Counter[str] = field(default_factory=Counter)
    codes: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not (self.problems or self.odd_ends or self.stuck)


async def chaos(plan: Plan, say: Callable[[str], None] = lambda line: None) -> Verdict:
    """Runs ``plan``; ``say`` gets a line for each thing that happens."""
    with tempfile.TemporaryDirectory() as folder:
        model, bound = plan.model, dict[str, str]()
        if model is None:
            model = write_model(Path(folder) / "model", attention=plan.attention)
            bound = bound_of(plan.attention)
        program, environment = EVERSTREAM, bound
        if plan.drafts:
            draft = write_model(Path(folder) / "draft")
            program, environment = DRAFTING, bound | {"EVERSTREAM_DRAFT_MODEL": str(draft)}
        async with cluster_of(
            model, plan.seed, wires=plan.wires, environment=environment, program=program
        ) as cluster:
            return await _Run(plan, cluster, say).run(model, bound)


def bound_of(attention: str) -> dict[str, str]:
    """The variables of the bound of a model whose past slides; others have that of the server."""
    context, past = BOUNDED.get(attention, (0, "stop"))
    if past == "stop":
        return {}
    return {"EVERSTREAM_CONTEXT": str(context), "EVERSTREAM_PAST": past}


class _Run:
    def __init__(self, plan: Plan, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._plan, self._cluster, self._say = plan, cluster, say
        self._chance = random.Random(f"{plan.seed} clients")
        self._recording, self._waits = Recording(), Waits()
        self._world = World(cluster.replicas, self._recording, self._waits)
        self._start_s = time.monotonic()
        self._verdict = Verdict(plan, type(cluster.network).__name__.lower(), waits=self._waits)
        cluster.on_strike, cluster.on_over = self._struck, self._over
        cluster.on_loss = self._lost

    async def run(self, model: Path, bound: dict[str, str]) -> Verdict:
        plan, verdict = self._plan, self._verdict
        for replica in self._cluster.replicas:
            verdict.odd_ends += [f"{one} before any fault" for one in replica.exits]
        scripts = scripts_of(self._chance, plan.num_scripts, plan.longest)
        expected = await expected_events(scripts, model, bound)
        self._start_s = time.monotonic()
        async with AsyncExitStack() as stack:
            clients = []
            for index in range(plan.num_clients):
                gap_s = self._chance.choice((0.0, 0.002, 0.005, 0.01))
                reader: Reader
                if index % 4 == 3:
                    reader = SseReader(self._world, gap_s, dict(expected))
                else:
                    reader = SocketReader(self._world, gap_s)
                    stack.push_async_callback(reader.close)
                name, seed = f"client {index}", f"{plan.seed} client {index}"
                clients.append(Client(name, self._world, reader, scripts, seed))
            playing = [asyncio.create_task(client.run()) for client in clients]
            await self._faults()
            self._world.is_ending = True
            await self._finish(playing)
        lost, present = await lost_and_present(self._cluster, model)
        log = lost | present
        verdict.problems = checker.problems(
            self._recording, log, expected, self._world.finished, lost.keys()
        )
        self._count()
        verdict.counts["sessions in the logs"] = len(log)
        return verdict

    async def _faults(self) -> None:
        plan, chance = self._plan, random.Random(f"{self._plan.seed} faults")
        injector = Injector(self._cluster)
        running: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as group:
            for fault in schedule(chance, len(self._cluster.replicas), LEASE_S, plan.kinds):
                if running and not fault.overlaps:
                    await asyncio.wait(running)
                    running.clear()
                    await self._some_are_up()
                await asyncio.sleep(fault.after_s)
                at_s = self._now
                if at_s > plan.seconds or len(self._verdict.faults) == plan.max_faults:
                    return
                self._verdict.faults.append((at_s, fault))
                self._say(f"{at_s:7.2f} s  {fault}")
                running.append(group.create_task(injector.inject(fault)))

    async def _some_are_up(self) -> None:
        """Faults hit a cluster that has got up again, so that they do more than hit the dead."""
        replicas = self._cluster.replicas
        with contextlib.suppress(TimeoutError):
            await eventually(
                lambda: sum(replica.is_up for replica in replicas) >= len(replicas) - 1, 10.0
            )

    async def _finish(self, playing: list[asyncio.Task[None]]) -> None:
        """Everybody comes to an end; who does not is stuck."""
        _, late = await asyncio.wait(playing, timeout=FINISH_S)
        for name, place in self._world.readers.items():
            self._verdict.stuck.append(
                f"{name}: {place.key}, session {place.session}, event {place.last_seq}"
            )
        for task in late:
            task.cancel()
        for outcome in await asyncio.gather(*playing, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def _count(self) -> None:
        verdict, world = self._verdict, self._world
        verdict.codes, verdict.outcomes = world.codes, world.outcomes
        for replica in self._cluster.replicas:
            verdict.exits += replica.exits
            verdict.odd_ends += replica.odd_ends()
            verdict.odd_ends += replica.tracebacks()
            verdict.logs[replica.name] = replica.process.log()
        verdict.counts.update(
            {
                "sessions read to their end": world.num_finished,
                "sessions lost with a store": len(world.lost),
                "connections that read": len(self._recording.attachments),
                "events delivered": self._recording.num_events,
                "faults": len(verdict.faults),
                "replicas started": sum(one.num_starts for one in self._cluster.replicas),
            }
        )

    # What the cluster tells

    @property
    def _now(self) -> float:
        return time.monotonic() - self._start_s

    def _struck(self, kind: str, replicas: Sequence[Replica]) -> None:
        names = {replica.incarnation for replica in replicas}
        for place in self._world.readers.values():
            attachment = place.attachment
            if attachment is not None and attachment.replica in names:
                self._waits.struck(kind, place.client, attachment, time.monotonic())

    def _over(self, kind: str, was_all: bool) -> None:
        self._waits.over(kind, time.monotonic(), was_all)

    def _lost(self) -> None:
        self._world.num_losses += 1
