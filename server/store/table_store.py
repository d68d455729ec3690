"""What a store answers from tables that no other process writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from server.engine.value import Deleted, Record
from server.errors import SessionNotFound
from server.store import reading
from server.store.base import Events, Found, Keyed, Loaded, Numbered
from server.store.clock import StoreClock
from server.store.heads import Head
from server.store.saving import Connected


class TableStore(ABC):
    """The part of `server.store.base.Store` that only reads.

    ``_touched`` are the keys of the sessions that were used since the last `maintain`.
    """

    def __init__(self) -> None:
        self._clock = StoreClock()
        self._touched: set[int] = set()

    @abstractmethod
    def _connected(self) -> AbstractContextManager[Connected]:
        """The connection; its errors as those of a store."""

    @abstractmethod
    def commit(self, records: Sequence[Record]) -> None:
        """See `server.store.base.Store.commit`."""

    def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
        """See `server.store.base.Store.load`."""
        with self._connected() as connection:
            return reading.loaded(connection, self._find(connection, session, owner), at)

    def read(self, session: str, owner: str, after_seq: int, max_events: int) -> Events:
        """See `server.store.base.Store.read`."""
        with self._connected() as connection:
            head = self._find(connection, session, owner)
            return reading.events(connection, head, after_seq, max_events)

    def discard(self, session: str, owner: str) -> None:
        """See `server.store.base.Store.discard`."""
        with self._connected() as connection:
            self._find(connection, session, owner)
        self.commit([(session, Deleted())])

    def entries(self, session: str, owner: str, place: int, max_entries: int) -> Numbered:
        """See `server.store.base.Store.entries`."""
        with self._connected() as connection:
            head = self._find(connection, session, owner)
            return reading.entries(connection, head, place, max_entries)

    def log_end(self, session: str, owner: str) -> int:
        """See `server.store.base.Store.log_end`."""
        with self._connected() as connection:
            return reading.log_end(self._find(connection, session, owner))

    def find_key(self, owner: str, key: str) -> Keyed | None:
        """See `server.store.base.Store.find_key`."""
        with self._connected() as connection:
            return connection.tables.find_key(owner, key)

    def list(self, owner: str | None, after: str | None, limit: int) -> Found:
        """See `server.store.base.Store.list`."""
        with self._connected() as connection:
            return reading.listed(connection, owner, after, limit)

    def unfinished(self) -> Sequence[tuple[str, str]]:
        """See `server.store.base.Store.unfinished`."""
        with self._connected() as connection:
            heads = connection.log.heads
            stored = connection.tables.unfinished()
            owners = {id: owner for id, owner in stored.items() if id not in heads}
            owners |= {id: head.owner for id, head in heads.items() if head.running is not None}
            return sorted(owners.items())

    def stored_bytes(self, owner: str) -> int:
        """See `server.store.base.Store.stored_bytes`."""
        with self._connected() as connection:
            return connection.tables.stored_bytes(owner)

    def _find(self, connection: Connected, session: str, owner: str) -> Head:
        head = connection.log.head(session)
        if head is None or head.owner != owner:
            raise SessionNotFound
        self._touched.add(head.key)
        return head
