"""The bounded queue of commands into the engine's thread. It sleeps; nothing polls."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class CommandQueue(Generic[T]):
    """Many writers, one taker, any thread."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def post(self, item: T, *, urgent: bool = False) -> bool:
        """Adds an item; False if the box is full or closed.

        ``urgent`` passes the bound, for commands that give something back, such
        as a cancel: there are never more of them than of live requests.
        """
        with self._changed:
            if self._closed or (len(self._items) >= self._max_items and not urgent):
                return False
            self._items.append(item)
            self._changed.notify()
            return True

    def close(self) -> None:
        """Refuses further items. Those inside are still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, timeout_s: float | None) -> list[T] | None:
        """All items; sleeps for the first one up to ``timeout_s`` (None: no limit, 0: not at all).

        Returns an empty list after the timeout, and None once the box is closed and empty.
        """
        with self._changed:
            if timeout_s is None or timeout_s > 0:
                self._changed.wait_for(lambda: self._items or self._closed, timeout_s)
            if self._closed and not self._items:
                return None
            items = list(self._items)
            self._items.clear()
            return items
