"""When to retry after a transient failure: exponential, jittered, bounded."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .errors import EverstreamError


@dataclass(frozen=True)
class Backoff:
    """Waits of ``first_s``, twice that, and so on up to ``most_s``.

    Of each between half and all is waited, by chance, so that the clients of a
    server that comes back do not all come at once. ``random`` gives 0 to 1;
    ``sleep`` and ``clock`` count in seconds.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic

    def attempts(self, total_s: float) -> Attempts:
        """The waits between attempts at one thing; no attempt begins after ``total_s`` from now."""
        return Attempts(self, total_s)


class Attempts:
    """The waits between attempts at one thing, and the time after which there is no other."""

    def __init__(self, backoff: Backoff, total_s: float) -> None:
        self._backoff = backoff
        self._ends_s = backoff.clock() + total_s
        self._next_s = backoff.first_s

    async def wait(self, error: EverstreamError) -> None:
        """Waits until the next try is due; raises ``error``, the last one's, if there is none.

        What the server says of when to come again is heeded.
        """
        left_s = self._ends_s - self._backoff.clock()
        if left_s <= 0:
            raise error
        delay_s = self._next_s * (1 + self._backoff.random()) / 2
        self._next_s = min(self._backoff.most_s, 2 * self._next_s)
        await self._backoff.sleep(min(left_s, max(delay_s, error.retry_after_s or 0)))


DEFAULT = Backoff()
