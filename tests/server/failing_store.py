"""A store in memory that fails when it is told to, waits, and outlives its server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from server.engine.session import Record
from server.store.base import StoreError
from server.store.sqlite.store import MemoryStore


class FailingStore(MemoryStore):
    """Raises ``error`` while there is one; knows the number of records of each commit.

    Its `maintain` returns ``has_more``.

    After `hold` a commit waits for `unblock`; `held` tells whether one does.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.error: StoreError | None = None
        self.num_committed: list[int] = []
        self.num_maintained = 0
        self.has_more = False
        self.is_closed = False
        self.held = threading.Event()
        self._free = threading.Event()
        self._free.set()

    def hold(self) -> None:
        self.held.clear()
        self._free.clear()

    def replace(self) -> None:
        """Puts an empty one in its place."""
        vars(self).update(vars(MemoryStore()))

    def unblock(self) -> None:
        self._free.set()

    def commit(self, records: Sequence[Record]) -> None:
        if not self._free.is_set():
            self.held.set()
            assert self._free.wait(60)
        if self.error is not None:
            raise self.error
        self.num_committed.append(len(records))
        super().commit(records)

    def maintain(self, now_s: float) -> bool:
        self.num_maintained += 1
        if self.error is not None:
            raise self.error
        super().maintain(now_s)
        return self.has_more

    def close(self) -> None:
        """Keeps what it has, for the next server."""
        self.is_closed = True
