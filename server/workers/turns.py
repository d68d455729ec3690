"""Who uses a worker next: owners take turns, so that one with many requests delays others less."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TooManyWait(Exception):
    """The owner has as many requests here as it may have."""


class Turns:
    """Belongs to the event loop; ``num_at_once`` have a turn at the same time.

    An owner may have ``max_requests``, those in their turn included.
    """

    def __init__(self, max_requests: float, num_at_once: int = 1) -> None:
        self._max_requests, self._num_free = max_requests, num_at_once
        self._num_of: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Begins when it is the owner's turn. Raises `TooManyWait`."""
        if self._num_of[owner] >= self._max_requests:
            raise TooManyWait
        self._num_of[owner] += 1
        try:
            if self._num_free:
                self._num_free -= 1
            else:
                await self._wait(owner)
            try:
                yield
            finally:
                self._begin_next()
        finally:
            self._num_of[owner] -= 1
            if not self._num_of[owner]:
                del self._num_of[owner]

    async def _wait(self, owner: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this one's turn already
                self._begin_next()
            raise

    def _begin_next(self) -> None:
        """To the next owner, who is the last one then, if any waits."""
        while self._waiting:
            owner, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
