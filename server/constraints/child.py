"""One child process that tries formats out, from the side of the event loop.

It is started when the first format comes and stays; one that takes too long, too
much memory, or dies, is killed, and the next format gets a new one. The child is a
new program, not a copy of this process: nothing that is open here is open there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.constraints.errors import NotTried, Refused
from server.constraints.vocabulary import Vocabulary
from server.constraints.worker import frame, setup_frame

logger = logging.getLogger("everstream.constraints")

ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 30.0

TOO_SLOW = "took too long to compile"
TOO_LARGE = "takes too much time or memory to compile"

_LENGTH = struct.Struct("<I")

#: Each thread of a library would reserve memory, of which there is a bound.
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What one format may take. ``max_cpu_s`` is rounded up to a whole second.

    ``timeout_s`` is by the clock, for a child that does not even compute.
    """

    max_cpu_s: float = 2.0
    timeout_s: float = 10.0
    max_memory_bytes: int = 512 << 20


class Child:
    """One at a time: the caller keeps the order. `close` it."""

    def __init__(self, vocabulary: Vocabulary, limits: TrialLimits) -> None:
        self._setup = frame(setup_frame(vocabulary, limits.max_memory_bytes, limits.max_cpu_s))
        self._limits = limits
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    async def grammar(self, format: Mapping[str, Any]) -> str:
        """Its grammar text. Raises `Refused`."""
        process = await self._ready()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                answer = await _asked(process, frame(format))
        except TimeoutError:
            await self.close()
            raise NotTried(TOO_SLOW) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.close()
            raise Refused(TOO_LARGE) from None
        except asyncio.CancelledError:
            await self.close()  # its answer would be taken for the next one's
            raise
        if "refused" in answer:
            raise Refused(answer["refused"])
        return str(answer["grammar"])

    async def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.shield(process.wait())

    async def _started(self) -> Process:
        """A new one that has its vocabulary."""
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "server.constraints.worker"),
            stdin=PIPE,
            stdout=PIPE,
            cwd=ROOT,
            env=_ENVIRONMENT,
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await _asked(process, self._setup)
        except BaseException:
            await self.close()
            raise
        return process

    async def _ready(self) -> Process:
        """One that waits for a format. Raises `NotTried` where it does not start."""
        process = self._process
        if process is not None and process.returncode is None:
            return process
        await self.close()
        try:
            return await self._started()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.error("the process that tries formats does not start: %r", error)
            raise NotTried("cannot be compiled at present") from error


async def _asked(process: Process, request: bytes) -> Any:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(request)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return json.loads(await process.stdout.readexactly(length))
