"""Between the driver and one reader: a bounded queue that reports overflow instead of waiting.

One reader may own several requests (a WebSocket does), so that one wake-up of
its sender takes all that a step made for it. Mostly it need not even wake up:
see `Outbox.take`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from server.engine.errors import EngineError

T = TypeVar("T")


class ReaderTooSlow(EngineError):
    """The client did not read its events before the outbox was full."""

    code = "reader_too_slow"

    def __init__(self) -> None:
        super().__init__("the client reads too slowly; its requests were cancelled")


class Outbox(Generic[T]):
    """Items for one reader, in order. Lives in the event loop; not thread safe.

    ``broken`` is done, with the error as its result, once the outbox overflowed
    or failed: what waited is dropped, `put` has no effect and `take` raises. A
    reader that may hang in a send watches it.
    """

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._shortcut: Callable[[Sequence[T]], bool] | None = None
        self.broken: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()

    def put(self, items: Sequence[T]) -> bool:
        """Adds items; False where these very items made the outbox overflow."""
        if self.broken.done():
            return True
        if self._shortcut is not None and self._shortcut(items):
            return True
        if len(self._items) + len(items) > self._max_items:
            self.fail(ReaderTooSlow())
            return False
        self._items.extend(items)
        self._wake()
        return True

    def fail(self, error: EngineError) -> None:
        """Drops what waits and lets the reader see ``error``. The first failure counts."""
        if self.broken.done():
            return
        self.broken.set_result(error)
        self._items.clear()
        self._wake()

    async def take(self, shortcut: Callable[[Sequence[T]], bool] | None = None) -> list[T]:
        """All waiting items, at least one; raises the `EngineError` of a broken outbox.

        As long as it waits, `put` offers its items to ``shortcut``. Where that
        returns True it has dealt with them, and the reader sleeps on.
        """
        while not self._items:
            if self.broken.done():
                raise self.broken.result()
            self._waiter = asyncio.get_running_loop().create_future()
            self._shortcut = shortcut
            try:
                await self._waiter
            finally:
                self._waiter = self._shortcut = None
        items = list(self._items)
        self._items.clear()
        return items

    def _wake(self) -> None:
        self._shortcut = None  # what comes now must not overtake what waits
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
