"""Values that sessions continue from, before they are on the disk: a lost one costs a replay."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from server.engine.value import SessionValue
from server.store.heads import Head


class Save(NamedTuple):
    """A value, before the entry of number ``place`` of its session's log."""

    key: int
    place: int
    value: SessionValue


class Unsaved:
    """The newest value of each session that has one; the one that waits longest comes first."""

    def __init__(self) -> None:
        self._saves: dict[str, Save] = {}
        self.num_bytes = 0

    def add(self, head: Head, value: SessionValue) -> None:
        """The session is at ``value``, after the entries that it has now."""
        if (before := self._saves.get(head.id)) is not None:  # its turn is the new one's
            self.num_bytes -= _size(before.value)
        self._saves[head.id] = Save(head.key, head.num_entries, value)
        self.num_bytes += _size(value)

    def drop(self, session: str) -> None:
        """The value is on the disk, or of no use."""
        save = self._saves.pop(session, None)
        if save is not None:
            self.num_bytes -= _size(save.value)

    def get(self, session: str) -> Save | None:
        """The newest of a session."""
        return self._saves.get(session)

    def oldest(self, count: int | None) -> list[Save]:
        """So many, or all."""
        return list(islice(self._saves.values(), count))

    def clear(self) -> None:
        """Another store: none of them belongs to it."""
        self._saves.clear()
        self.num_bytes = 0


def _size(value: SessionValue) -> int:
    return 0 if value.state is None else value.state.data.nbytes
