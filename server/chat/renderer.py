"""The server's side of the sandbox: a process that renders, and its replacement when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from server.chat import sandbox
from server.errors import InvalidRequest, invalid
from server.workers.process import ROOT, WorkerEnded, WorkerProcess

TIMEOUT_S = 5.0
MAX_CHARS = 4 << 20


class Renderer:
    """Renders chat templates, one at a time. Belongs to one event loop; `close` it.

    The process starts with the first template. A rendering that takes longer
    than ``timeout_s`` seconds costs its process; the next one gets a new one.
    """

    def __init__(
        self,
        timeout_s: float = TIMEOUT_S,
        max_chars: int = MAX_CHARS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._timeout_s, self._max_chars, self._clock = timeout_s, max_chars, clock
        self._turn = asyncio.Lock()
        # Of the environment, which may hold keys, it sees nothing.
        path = dict.fromkeys([*filter(None, sys.path), str(ROOT)])
        self._worker = WorkerProcess(
            (sys.executable, "-P", str(Path(sandbox.__file__))),
            {"PYTHONPATH": os.pathsep.join(path)},
        )

    async def render(self, source: str, variables: Mapping[str, object]) -> str:
        """What ``source`` makes of ``variables``; raises `InvalidRequest` with what it says."""
        request = {
            "source": source,
            "variables": variables,
            "max_chars": self._max_chars,
            "now_s": self._clock(),
            "timeout_s": self._timeout_s,
        }
        async with self._turn:
            try:
                found = await self._worker.ask(request)
            except WorkerEnded as ended:
                raise _failed(self._reason(ended.code)) from None
        if "error" in found:
            raise _failed(found["error"])
        text: str = found["text"]
        return text

    async def close(self) -> None:
        """Ends the process, if there is one."""
        async with self._turn:
            await self._worker.close()

    def _reason(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"it takes longer than {self._timeout_s:g} seconds"
        return f"its process ended with {code}"


def _failed(message: str) -> InvalidRequest:
    return invalid("messages", f"the model's chat template says: {message}")
