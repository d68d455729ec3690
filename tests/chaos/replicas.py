"""Replicas: server processes that are watched, and started again when they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.network import Network
from tests.reliability.servers import EVERSTREAM, ServerProcess
from tests.waiting import eventually

#: Ways in which a replica may end by itself: it was shut out, or it could not have its store.
OWN_ENDS = {1, 2}
MAX_LOG_CHARS = 2000


@dataclass(frozen=True)
class Exit:
    """How a process ended. ``meant`` where a fault or a drain was to end it so."""

    replica: str
    code: int | None
    at_s: float
    meant: bool


class Replica:
    """One of the cluster. ``incarnation`` names its present process, or the last one.

    While it is ``held`` it is not started again.
    """

    def __init__(
        self,
        index: int,
        network: Network,
        database: str,
        model: Path,
        environment: Mapping[str, str],
        chance: random.Random,
        program: tuple[str, ...] = EVERSTREAM,
    ) -> None:
        self.index = index
        self.name = f"replica {index + 1}"
        self.exits: list[Exit] = []
        self.is_up = False
        self.num_starts = 0
        self.url = ""
        self._network, self._chance = network, chance
        self._meant: dict[int, int | None] = {}
        self._ended = asyncio.Condition()
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._up = asyncio.Event()
        self.process = ServerProcess(
            *("--model", model, "--store", network.store_url(index, database)),
            *("--drain-timeout", "5"),
            environment=environment,
            host=network.host(index),
            port=network.port(index),
            within=network.within(index),
            program=program,
        )

    async def up(self) -> None:
        """Returns when it takes work. Its end takes a moment to be noticed."""
        await self._up.wait()

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self.num_starts}"

    async def run(self) -> None:
        """Keeps it running until it is cancelled; then it is killed."""
        try:
            while True:
                await self._may_start.wait()
                await self._live()
                await asyncio.sleep(self._chance.uniform(0.1, 1.0))
        finally:
            self.is_up = False
            self.process.close()

    def report(self) -> str:
        """How often it was started, how it ended, and the end of its log."""
        codes = [one.code for one in self.exits]
        log = self.process.log()[-MAX_LOG_CHARS:]
        return f"{self.name}: {self.num_starts} starts, ended with {codes}, its log:\n{log}"

    async def _live(self) -> None:
        """From a start to an end."""
        self.num_starts += 1
        self.process.launch()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._wait_ready())
                code = await self.process.ended()
                self.is_up = False
                self._up.clear()
                at_s = time.monotonic()
        finally:
            self.process.kill()
        self.exits.append(Exit(self.incarnation, code, at_s, self._is_meant(code)))
        async with self._ended:
            self._ended.notify_all()

    def _is_meant(self, code: int | None) -> bool:
        return self.num_starts in self._meant and self._meant[self.num_starts] in (None, code)

    async def _wait_ready(self) -> None:
        """Returns when it takes work, or has ended: it may be killed, or give up, while it starts.

        Until then it may say for a while that it takes none, as where its store does not answer.
        """
        if not await asyncio.to_thread(self.process.wait_listening):
            return
        # However long that takes: faults keep it from its store.
        await eventually(lambda: self.process.takes_work() or self.process.has_ended, None)
        if self.process.has_ended:
            return
        url = await self._network.address(self.index, self.process.port)
        if not self.process.has_ended:
            self.url, self.is_up = url, True
            self._up.set()

    # Faults

    def hold(self) -> None:
        self._may_start.clear()

    def release(self) -> None:
        self._may_start.set()

    def signal(self, number: signal.Signals) -> None:
        """Where the process has ended there is nothing to do."""
        with contextlib.suppress(ProcessLookupError, AssertionError):
            os.kill(self.process.pid, number)

    def mean_to_end(self) -> None:
        """Its end is a fault's doing."""
        self._meant[self.num_starts] = None

    def mean_to_drain(self) -> None:
        """It ends in peace: with 0, or as one that was shut out meanwhile."""
        self._meant[self.num_starts] = 0

    async def ended(self, num_exits: int) -> None:
        """Returns when it has ended more often than that."""
        async with self._ended:
            await self._ended.wait_for(lambda: len(self.exits) > num_exits)

    def odd_ends(self) -> list[str]:
        """Ends that no fault explains."""
        return [
            f"{one.replica} ended with {one.code}"
            for one in self.exits
            if not one.meant and one.code not in OWN_ENDS
        ]

    def tracebacks(self) -> list[str]:
        """The error that each traceback in its log ends with."""
        found = []
        for part in self.process.log().split("Traceback (most recent call last):")[1:]:
            lines = [line for line in part.splitlines() if re.match(r"[A-Za-z_.]+(:|$)", line)]
            found.append(f"{self.name}: {lines[0] if lines else part[:200]}")
        return found
