"""The server's side of the sandbox: a process that renders, and its replacement when it dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from server.chat import sandbox
from server.chat.sandbox import LENGTH
from server.errors import InvalidRequest, invalid

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
        self._process: asyncio.subprocess.Process | None = None

    async def render(self, source: str, variables: Mapping[str, object]) -> str:
        """What ``source`` makes of ``variables``; raises `InvalidRequest` with what it says."""
        request = {
            "source": source,
            "variables": variables,
            "max_chars": self._max_chars,
            "now_s": self._clock(),
            "timeout_s": self._timeout_s,
        }
        body = json.dumps(request).encode()
        async with self._turn:
            try:
                process = await self._running()
                found = json.loads(await _exchange(process, body))
            except (EOFError, ConnectionError):
                raise _failed(await self._reason()) from None
            except BaseException:  # nobody waits for the answer, and the next one must not get it
                await self._end()
                raise
        if "error" in found:
            raise _failed(found["error"])
        text: str = found["text"]
        return text

    async def close(self) -> None:
        """Ends the process, if there is one."""
        async with self._turn:
            await self._end()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(Path(sandbox.__file__))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # Of the environment, which may hold keys, it sees nothing.
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        return self._process

    async def _reason(self) -> str:
        """Why the process has ended."""
        assert self._process is not None
        code = await self._process.wait()
        if code == -signal.SIGALRM:
            return f"it takes longer than {self._timeout_s:g} seconds"
        return f"its process ended with {code}"

    async def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._process = None


async def _exchange(process: asyncio.subprocess.Process, body: bytes) -> bytes:
    """One request and its answer; raises where the process dies of it."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(LENGTH.pack(len(body)) + body)
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH.size)
    return await process.stdout.readexactly(*LENGTH.unpack(head))


def _failed(message: str) -> InvalidRequest:
    return invalid("messages", f"the model's chat template says: {message}")
