"""The child process that tries formats, from the side of the event loop.

It is started when the first format comes and stays; one that takes too long, too
much memory, or dies, is killed, and the next format gets a new one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.constraints.errors import FormatRefused, NotTried
from server.constraints.vocabulary import Vocabulary
from server.constraints.worker import setup_request
from server.workers.process import ROOT, WorkerEnded, WorkerProcess, WorkerUnavailable

logger = logging.getLogger("everstream.constraints")

TOO_SLOW = "took too long to compile"
TOO_LARGE = "takes too much time or memory to compile"

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
        self._timeout_s = limits.timeout_s
        self._worker = WorkerProcess(
            (sys.executable, "-m", "server.constraints.worker"),
            _ENVIRONMENT,
            ROOT,
            setup_request(vocabulary, limits.max_memory_bytes, limits.max_cpu_s),
        )

    async def grammar(self, format: Mapping[str, Any]) -> str:
        """Its grammar text. Raises `FormatRefused`."""
        try:
            answer = await self._worker.ask(format, self._timeout_s)
        except WorkerUnavailable as error:
            logger.error("the process that checks formats could not be started: %s", error)
            raise NotTried("cannot be compiled at present") from error
        except TimeoutError:
            raise NotTried(TOO_SLOW) from None
        except WorkerEnded:
            raise FormatRefused(TOO_LARGE) from None
        if "refused" in answer:
            raise FormatRefused(answer["refused"])
        return str(answer["grammar"])

    async def close(self) -> None:
        """Ends the process, if there is one."""
        await self._worker.close()
