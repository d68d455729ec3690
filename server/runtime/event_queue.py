"""A bounded queue from the async engine to one reader, which reports overflow and never waits.

One reader may own several requests (a WebSocket does), so that one wake-up of
its sender takes all that a step made for it. Mostly it need not even wake up:
see `EventQueue.take`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from server.errors import RequestError

T = TypeVar("T")

#: What can be undelivered when a reader is paused: 32 tokens of each of 128 requests.
MAX_IN_FLIGHT = 4096


class ReaderTooSlow(RequestError):
    """The client did not read its events before the event queue was full."""

    code = "reader_too_slow"
    message = "the client reads too slowly; its requests were cancelled"


class EventQueue(Generic[T]):
    """Items for one reader, in order. Lives in the event loop; not thread safe.

    ``on_backpressure`` is called with True for each `put` that leaves it half full or
    more, and with False once the reader has taken all of that. As what is on its
    way then still comes, there is room for ``spare`` items more. ``broken`` is
    done, with the error as its result, once the event queue overflowed anyway,
    or failed: what waited is dropped, `put` has no effect and `take` raises. A
    reader that may hang in a send watches it.
    """

    def __init__(
        self, max_items: int, on_backpressure: Callable[[bool], None] | None = None, spare: int = 0
    ) -> None:
        self._max_items, self._spare = max_items, spare
        self._on_backpressure = on_backpressure or (lambda full: None)
        self._has_backpressure = False
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[bool] | None = None
        self._taken: asyncio.Future[None] | None = None
        self._direct_write: Callable[[Sequence[T]], bool] | None = None
        self.broken: asyncio.Future[RequestError] = asyncio.get_running_loop().create_future()

    def put(self, items: Sequence[T]) -> bool:
        """Adds items; False where these very items made the event queue overflow."""
        if self.broken.done():
            return True
        if self._direct_write is not None and self._direct_write(items):
            return True
        if len(self._items) + len(items) > self._max_items + self._spare:
            self.fail(ReaderTooSlow())
            return False
        self._items.extend(items)
        self._wake()
        if len(self._items) * 2 >= self._max_items:
            self._has_backpressure = True
            self._on_backpressure(True)
        return True

    async def emptied(self) -> None:
        """Returns when the reader has taken all that was put, or never will."""
        while self._items and not self.broken.done():
            if self._taken is None:
                self._taken = asyncio.get_running_loop().create_future()
            watched: set[asyncio.Future[Any]] = {self._taken, self.broken}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)

    def fail(self, error: RequestError) -> None:
        """Drops what waits and lets the reader see ``error``. The first failure counts."""
        if self.broken.done():
            return
        self.broken.set_result(error)
        self._items.clear()
        self._wake()

    async def take(self, direct_write: Callable[[Sequence[T]], bool] | None = None) -> list[T]:
        """All waiting items, at least one; raises the `RequestError` of a broken event queue.

        Returns none only where `nudge` ended the wait. As long as it waits, `put` offers its
        items to ``direct_write``. Where that returns True it has dealt with them, and the
        reader sleeps on.
        """
        while not self._items:
            if self.broken.done():
                raise self.broken.result()
            self._waiter = asyncio.get_running_loop().create_future()
            self._direct_write = direct_write
            try:
                is_nudged = await self._waiter
            finally:
                self._waiter = self._direct_write = None
            if is_nudged:
                break
        items = list(self._items)
        self._items.clear()
        if self._taken is not None:
            self._taken.set_result(None)
            self._taken = None
        if self._has_backpressure:
            self._has_backpressure = False
            self._on_backpressure(False)
        return items

    def nudge(self) -> None:
        """Lets a reader that waits in `take` return without items."""
        self._wake(is_nudged=True)

    def _wake(self, is_nudged: bool = False) -> None:
        self._direct_write = None  # what comes now must not overtake what waits
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(is_nudged)
