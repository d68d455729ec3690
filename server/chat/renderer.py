"""The server's side of the sandbox: processes that render, and their replacement when they die."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from server.chat import sandbox
from server.errors import InvalidRequest, invalid
from server.workers.process import ROOT, Turns, WorkerEnded, WorkerProcess

TIMEOUT_S = 5.0
MAX_CHARS = 4 << 20
#: Templates that run at the same time. A slow one delays no other one while they are fewer.
NUM_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Rendered:
    """``text`` is what a template writes. ``shared``: see `Renderer.render`."""

    text: str
    shared: Sequence[tuple[int, str]] = ()


class Renderer:
    """Renders chat templates, `NUM_PROCESSES` at a time. Belongs to one event loop; `close` it.

    A process starts when it is needed first. A rendering that takes longer
    than ``timeout_s`` seconds costs its process; the next one gets a new one.
    """

    def __init__(
        self,
        timeout_s: float = TIMEOUT_S,
        max_chars: int = MAX_CHARS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._timeout_s, self._max_chars, self._clock = timeout_s, max_chars, clock
        self._turns = Turns(math.inf, NUM_PROCESSES)
        # Of the environment, which may hold keys, it sees nothing.
        path = dict.fromkeys([*filter(None, sys.path), str(ROOT)])
        command = (sys.executable, "-P", str(Path(sandbox.__file__)))
        env = {"PYTHONPATH": os.pathsep.join(path)}
        self._workers = [WorkerProcess(command, env) for _ in range(NUM_PROCESSES)]
        #: The one that was used last is the next: a second one starts where two are needed.
        self._idle = [*self._workers]

    async def render(
        self,
        source: str,
        variables: Mapping[str, object],
        others: Sequence[Mapping[str, object]] = (),
        owner: str = "",
    ) -> Rendered:
        """What ``source`` makes of ``variables``; raises `InvalidRequest` with what it says.

        ``others`` are rendered as well: ``variables`` with more messages, ``following``, and other
        values of what else they name. ``shared`` has, for those that the template allows, how many
        characters the text begins with in common, and what comes next in theirs. It is empty where
        a template is slow. Owners take turns.
        """
        request = {
            "source": source,
            "variables": variables,
            "others": others,
            "max_chars": self._max_chars,
            "now_s": self._clock(),
            "timeout_s": self._timeout_s,
        }
        async with self._turns.turn(owner):
            worker = self._idle.pop()
            try:
                found = await worker.ask(request)
            except WorkerEnded as ended:
                raise _failed(self._reason(ended.code)) from None
            finally:
                self._idle.append(worker)
        if "error" in found:
            raise _failed(found["error"])
        return Rendered(found["text"], [(place, ahead) for place, ahead in found["shared"]])

    async def close(self) -> None:
        """Ends the processes, after what they render."""
        async with AsyncExitStack() as turns:
            for _ in self._workers:
                await turns.enter_async_context(self._turns.turn(""))
            for worker in self._workers:
                await worker.close()

    def _reason(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"it takes longer than {self._timeout_s:g} seconds"
        return f"its process ended with {code}"


def _failed(message: str) -> InvalidRequest:
    return invalid("messages", f"the model's chat template says: {message}")
