"""Values to snapshots: written, thinned with age, and logs cut to what is needed after them.

Times are seconds that the store has been open, as its owner's clock counted them (`StoreClock`):
nothing expires because a wall clock jumps, or while no server runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol

from server.store.database import Database
from server.store.heads import Head
from server.store.log import Log
from server.store.snapshots import Save, SnapshotRow, Snapshots, Unsaved
from server.store.tables import Tables

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
