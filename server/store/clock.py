"""The time of a store: the seconds that it has been open, as its owner's clock counted them.

Nothing expires because a wall clock jumps, or while no server runs.
"""

from __future__ import annotations

#: What a crash may take from the clock.
PERSIST_S = 60.0


class StoreClock:
    """Continues from where the store left it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._last_s: float | None = None
        self._stored_s = 0.0

    def set(self, now_s: float) -> None:
        """What the store remembers."""
        self.now_s = self._stored_s = now_s

    def advance(self, monotonic_s: float) -> None:
        """By what has passed since the last call."""
        if self._last_s is not None:
            self.now_s += max(0.0, monotonic_s - self._last_s)
        self._last_s = monotonic_s

    @property
    def is_due(self) -> bool:
        """Whether the store should remember the time again."""
        return self.now_s - self._stored_s >= PERSIST_S

    def stored(self) -> None:
        """The store remembers the time now."""
        self._stored_s = self.now_s
