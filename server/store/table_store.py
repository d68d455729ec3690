"""What all stores answer in the same way: from tables, and the entries that come after them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from server.engine.types import Finished, TokenEvent
from server.engine.value import Deleted, Entry, Record
from server.errors import SessionNotFound
from server.store.base import Events, Found, Keyed, Listed, Loaded, Numbered
from server.store.errors import HistoryGone, SessionBroken
from server.store.heads import Head, length_after
from server.store.saving import Connected, StoreClock

R = TypeVar("R")

#: What reads a session: ``rest`` are its entries after all that ``head`` has.
OfSession = Callable[[Connected, Head, Iterable[Entry]], R]


class TableStore(ABC):
    """The part of `server.store.base.Store` that only reads.

    ``_touched`` are the keys of the sessions that were used since the last `maintain`.
    """

    def __init__(self) -> None:
        self._clock = StoreClock()
        self._touched: set[int] = set()

    @abstractmethod
    def _ask(self, ask: Callable[[Connected], R]) -> R: ...

    @abstractmethod
    def _ask_of(self, session: str, owner: str, ask: OfSession[R]) -> R:
        """Raises `SessionNotFound`."""

    def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
        return self._ask_of(session, owner, partial(loaded, at=at))

    def read(self, session: str, owner: str, after_seq: int, max_events: int) -> Events:
        ask = partial(events, after_seq=after_seq, max_events=max_events)
        return self._ask_of(session, owner, ask)

    def entries(self, session: str, owner: str, place: int, max_entries: int) -> Numbered:
        return self._ask_of(session, owner, partial(entries, place=place, max_entries=max_entries))

    def log_end(self, session: str, owner: str) -> int:
        return self._ask_of(session, owner, log_end)

    def find_key(self, owner: str, key: str) -> Keyed | None:
        return self._ask(lambda by: by.tables.find_key(owner, key))

    def list(self, owner: str | None, after: str | None, limit: int) -> Found:
        return self._ask(lambda by: listed(by, owner, after, limit))

    def stored_bytes(self, owner: str) -> int:
        return self._ask(lambda by: by.tables.stored_bytes(owner))


class LocalStore(TableStore):
    """One whose tables no other process writes."""

    @abstractmethod
    def _connected(self) -> AbstractContextManager[Connected]:
        """The connection; its errors as those of a store."""

    @abstractmethod
    def commit(self, records: Sequence[Record]) -> None: ...

    def _ask(self, ask: Callable[[Connected], R]) -> R:
        with self._connected() as connection:
            return ask(connection)

    def _ask_of(self, session: str, owner: str, ask: OfSession[R]) -> R:
        with self._connected() as connection:
            head = connection.log.head(session)
            if head is None or head.owner != owner:
                raise SessionNotFound
            self._touched.add(head.key)
            return ask(connection, head, ())

    def discard(self, session: str, owner: str) -> None:
        self._ask_of(session, owner, lambda connection, head, rest: None)
        self.commit([(session, Deleted())])

    def unfinished(self) -> Sequence[tuple[str, str]]:
        return self._ask(unfinished)


def loaded(connection: Connected, head: Head, rest: Iterable[Entry], at: int | None) -> Loaded:
    """See `server.store.base.Store.load`; there is no ``rest``."""
    refuse_broken(head)
    save = connection.unsaved.get(head.id)
    if save is not None and (at is None or save.value.min_length <= at):
        place, value = save.place, save.value
    elif (found := connection.snapshots.newest(head.key, at)) is not None:
        place, value = found
    else:
        raise HistoryGone("the session's state at this point is no longer kept", "at")
    return Loaded(value, past(connection.tables.entries(head, place), value.length, at))


def refuse_broken(head: Head) -> None:
    """Raises `SessionBroken` for a session in quarantine."""
    if head.broken is not None:
        raise SessionBroken


def events(
    connection: Connected, head: Head, rest: Iterable[Entry], after_seq: int, max_events: int
) -> Events:
    """See `server.store.base.Store.read`."""
    refuse_broken(head)
    if after_seq < head.log_seq:
        raise HistoryGone(f"only what came after {head.log_seq} is kept", "last_seq")
    found: Events = []
    last_seq = after_seq
    for entry in chain(connection.tables.entries_after(head, after_seq), rest):
        if isinstance(entry, TokenEvent | Finished) and entry.seq > last_seq:
            if len(found) == max_events:
                break
            found.append(entry)
            last_seq = entry.seq
    if [event.seq for event in found] != [*range(after_seq + 1, after_seq + 1 + len(found))]:
        raise SessionBroken
    if not found and max_events and head.seq > after_seq:
        raise SessionBroken
    return found


def entries(
    connection: Connected, head: Head, rest: Iterable[Entry], place: int, max_entries: int
) -> Numbered:
    """See `server.store.base.Store.entries`."""
    refuse_broken(head)
    kept = connection.tables.numbered(head, place)
    others = (found for found in enumerate(rest, head.num_entries) if found[0] >= place)
    page = [*islice(chain(kept, others), max_entries)]
    if max_entries and place < head.num_entries and not _begins(page, place, head):
        raise SessionBroken
    return page


def log_end(connection: Connected, head: Head, rest: Iterable[Entry]) -> int:
    """See `server.store.base.Store.log_end`."""
    refuse_broken(head)
    return head.num_entries + sum(1 for _ in rest)


def _begins(page: Numbered, place: int, head: Head) -> bool:
    """Whether nothing is missing before ``page`` but what is no longer kept."""
    if page and page[0][0] == place:
        return True
    seqs = (entry.seq for _, entry in page if isinstance(entry, TokenEvent | Finished))
    return next(seqs, head.log_seq) <= head.log_seq + 1 if page else head.seq == head.log_seq


def listed(connection: Connected, owner: str | None, after: str | None, limit: int) -> list[Listed]:
    """See `server.store.base.Store.list`; of a session that has a head, as that is."""
    found = []
    for id, of, epoch, length, seq, running, size in connection.tables.listed(owner, after, limit):
        if (head := connection.log.heads.get(id)) is not None:
            epoch, length, seq, running = head.epoch, head.length, head.seq, head.running
        found.append(Listed(id, of, epoch, length, seq, running is not None, size))
    return found


def unfinished(connection: Connected) -> list[tuple[str, str]]:
    """See `server.store.base.Store.unfinished`; of a session that has a head, as that is."""
    heads = connection.log.heads
    owners = connection.tables.unfinished()
    owners = {id: owner for id, owner in owners.items() if id not in heads}
    owners |= {id: head.owner for id, head in heads.items() if head.running is not None}
    return sorted(owners.items())


def past(entries: list[Entry], length: int, at: int | None) -> list[Entry]:
    """The first of ``entries``, up to where the text passes ``at`` tokens for good.

    ``length`` is that before them.
    """
    end = None if at is None or length <= at else 0
    for index, entry in enumerate(entries):
        length = length_after(entry, length)
        if at is not None and length > at:
            end = index + 1 if end is None else end
        elif at is not None and length < at:
            end = None
    return entries[:end]
