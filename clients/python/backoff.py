"""When to retry after a transient failure: exponential backoff with jitter, bounded."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .errors import EverstreamError


@dataclass(frozen=True)
class Backoff:
    """Delays of ``first_s``, twice that, and so on up to ``most_s``.

    Each delay is multiplied by a random factor from 0.5 to 1, so that the clients
    of a restarted server do not all reconnect at once. ``random`` returns 0 to 1;
    ``sleep`` and ``clock`` use seconds.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic

    def attempts(self, total_s: float) -> Attempts:
        """Returns the delays for one operation; no attempt begins after ``total_s`` from now."""
        return Attempts(self, total_s)


class Attempts:
    """The delays between the attempts at one operation, and the time of the last attempt."""

    def __init__(self, backoff: Backoff, total_s: float) -> None:
        self._backoff = backoff
        self._ends_s = backoff.clock() + total_s
        self._next_s = backoff.first_s

    async def wait(self, error: EverstreamError) -> None:
        """Waits until the next attempt is due; raises ``error`` if the time is over.

        ``error`` is that of the last attempt. The delay is at least its
        ``retry_after_s``, but does not exceed the time that is left.
        """
        left_s = self._ends_s - self._backoff.clock()
        if left_s <= 0:
            raise error
        delay_s = self._next_s * (1 + self._backoff.random()) / 2
        self._next_s = min(self._backoff.most_s, 2 * self._next_s)
        await self._backoff.sleep(min(left_s, max(delay_s, error.retry_after_s or 0)))


DEFAULT = Backoff()
