"""What all stores do alike: answer from tables and the log, and save values to snapshots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Literal, Protocol, TypeVar

from server.engine.session import Deleted, Entry, Record
from server.engine.types import Finished, TokenEvent
from server.errors import SessionNotFound
from server.store.base import (
    Events,
    Found,
    HistoryGone,
    Keyed,
    Listed,
    Loaded,
    Numbered,
    SessionBroken,
)
from server.store.log import Log
from server.store.rows import Database, Head, Tables, length_after
from server.store.states import Save, SnapshotRow, Snapshots, Unsaved

# -------------------------------------------------------------------------------------------------
# Values to snapshots: written, thinned with age, and logs cut to what is needed after them.
#
# Times are seconds that the store has been open, as its owner's clock counted them (`StoreClock`):
# nothing expires because a wall clock jumps, or while no server runs.


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


KEY_RETENTION_S = 86_400.0
#: What may wait in memory for its place in the store.
MAX_UNSAVED_BYTES = 64 << 20
#: Where there is more, each commit brings so many values to the store.
SAVED_AT_ONCE = 64
#: What a store with `StoreLimits.max_bytes` says.
OVER = "the session store has all the bytes that it may have"

#: Whether a commit outlasts a power cut, or the process alone.
Durability = Literal["full", "relaxed"]


@dataclass(frozen=True)
class StoreLimits:
    """What a store keeps.

    A session that was not used for ``retention_s`` is deleted. Of its log, what
    is beyond ``max_log_tokens`` goes, of its snapshots what is beyond
    ``max_snapshots``. A store with ``max_bytes`` takes no more.
    """

    retention_s: float | None = None
    max_log_tokens: int = 1 << 20
    max_snapshots: int = 12
    max_bytes: int | None = None


class Connected(Protocol):
    """What is known through a connection."""

    @property
    def database(self) -> Database: ...
    @property
    def log(self) -> Log: ...
    @property
    def tables(self) -> Tables: ...
    @property
    def snapshots(self) -> Snapshots: ...
    @property
    def unsaved(self) -> Unsaved: ...


class Saving:
    """For one connection; an error leaves it useless."""

    #: Whether what follows a transaction may only be done when that is on the disk.
    is_synced = True

    def __init__(self, connection: Connected, clock: StoreClock, limits: StoreLimits) -> None:
        self._connection, self._clock, self._limits = connection, clock, limits
        self._log, self._tables = connection.log, connection.tables
        self._snapshots = connection.snapshots

    def save(self, max_values: int | None = None) -> None:
        """Brings values to the disk, so many or all, oldest first."""
        self._write(self._connection.unsaved.oldest(max_values), ())

    def _is_due(self) -> bool:
        log = self._log
        is_behind = log.last_row != log.pruned_row
        return bool(is_behind or log.changed or log.unused_files or self._clock.is_due)

    def _write(
        self, saves: list[Save], touched: Iterable[int], max_changed: int | None = None
    ) -> None:
        """States to files first; then all else in one transaction, and then old files go.

        Of the sessions that have changed so many are looked at, or all.
        """
        now_s, log = self._clock.now_s, self._log
        files = self._write_states(saves)
        with self._connection.database.transaction(self.is_synced):
            self._add_rows(saves, files)
            for key in touched:
                self._tables.touch(key, now_s)
            log.prune(now_s)
            saved = (log.head(save.value.id) for save in saves)
            changed = set(islice(log.changed, max_changed))
            self._shorten(list(changed.union(head for head in saved if head is not None)))
            self._tables.forget_keys(now_s - KEY_RETENTION_S)
            self._note_time(now_s)
            unused = self._snapshots.unused(log.unused_files)
        self._saved(saves, files)
        self._snapshots.states.remove(unused)
        log.unused_files = set()
        log.changed -= changed

    def _note_time(self, now_s: float) -> None:
        self._connection.database.set_meta("clock_s", now_s)
        self._clock.stored()

    def _add_rows(self, saves: list[Save], files: list[str | None]) -> None:
        for save, file in zip(saves, files, strict=True):
            num_bytes = self._snapshots.add(
                save.key, save.place, save.value, file, self._snapshots.identity_key
            )
            self._tables.grow(save.key, num_bytes)

    def _saved(self, saves: list[Save], files: list[str | None]) -> None:
        """After the transaction."""
        for save, file in zip(saves, files, strict=True):
            self._connection.unsaved.drop(save.value.id)
            if save.value.state is not None:
                save.value.state.file = file

    def _write_states(self, saves: list[Save]) -> list[str | None]:
        """The file of each state; one that several share is written once."""
        states = {id(value.state): (value.state, value.position) for _, _, value in saves}
        found: dict[int, str | None] = {id(None): None}
        new = []
        for state, position in states.values():
            if state is not None:
                found[id(state)] = self._snapshots.file_of(state)
                if found[id(state)] is None:
                    new.append((state, position))
        written = self._snapshots.states.write(new)
        found.update((id(state), file) for (state, _), file in zip(new, written, strict=True))
        return [found[id(value.state)] for _, _, value in saves]

    def _shorten(self, heads: Sequence[Head]) -> None:
        """Thins the snapshots of sessions and trims their logs; all is asked for at first."""
        keys = [head.key for head in heads]
        rows, tokens = self._snapshots.rows_of(keys), self._tables.log_tokens(keys)
        for head, own, num_tokens in zip(heads, rows, tokens, strict=True):
            dropped = superfluous([row.min_length for row in own], self._limits.max_snapshots)
            if dropped:  # of old snapshots, fewer the older they are
                self._log.drop_snapshots(head.key, [own[index] for index in sorted(dropped)])
            if num_tokens > self._limits.max_log_tokens:
                self._trim(head, num_tokens - self._limits.max_log_tokens)

    def _trim(self, head: Head, excess: int) -> None:
        """Drops the oldest entries of a log that is too long, and snapshots before them."""
        rows = self._snapshots.rows(head.key)
        place = self._tables.drop_segments(head, excess, self._needed_entry(head, rows))
        self._log.drop_snapshots(head.key, [row for row in rows if row.place < place])

    def _needed_entry(self, head: Head, rows: Sequence[SnapshotRow]) -> int:
        """The first that stays, however long the log is: the two newest snapshots need it."""
        return rows[-2:][0].place if rows else 0


def superfluous(lengths: Sequence[int], max_snapshots: int) -> set[int]:
    """Indexes of the snapshots, oldest first, that need not be kept; each leads to such a length.

    Of the others the distances back from the newest grow about twofold. The two
    newest stay, and the oldest, from which all of the text can be reached.
    """
    kept = list(range(len(lengths)))
    while len(kept) > 3:
        present = lengths[kept[-1]]
        distances = [max(present - lengths[index], 0) + 1 for index in kept]
        ratios = [distances[i - 1] / distances[i + 1] for i in range(1, len(kept) - 2)]
        least = min(range(len(ratios)), key=ratios.__getitem__)
        if ratios[least] >= 2 and len(kept) <= max_snapshots:
            break
        del kept[least + 1]
    return set(range(len(lengths))).difference(kept)


# -------------------------------------------------------------------------------------------------
# What all stores answer in the same way: from tables, and the entries that come after them.


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
