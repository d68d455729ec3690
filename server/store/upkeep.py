"""What a store does about once a second, beside what it is asked: saving, thinning, expiring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from server.engine.value import Deleted
from server.store.clock import StoreClock
from server.store.connection import Connection
from server.store.heads import Head
from server.store.history import superfluous
from server.store.unsaved import Save

#: State files written at a time, so that commits do not wait long.
SAVES_AT_ONCE = 8
EXPIRED_AT_ONCE = 100
KEY_RETENTION_S = 86_400.0
CHECKPOINT_PAGES = 500
VACUUM_PAGES = 500


@dataclass(frozen=True)
class Limits:
    """What a store keeps.

    A session that nobody has used for ``retention_s`` is deleted. Of its log, what
    is beyond ``max_log_tokens`` goes, of its snapshots what is beyond
    ``max_snapshots``. A store with ``max_bytes`` takes no more.
    """

    retention_s: float | None = None
    max_log_tokens: int = 1 << 20
    max_snapshots: int = 12
    max_bytes: int | None = None


class Upkeep:
    """One round of it, on one connection. An error leaves the connection useless."""

    def __init__(self, connection: Connection, clock: StoreClock, limits: Limits) -> None:
        self._connection, self._clock, self._limits = connection, clock, limits
        self._database, self._log = connection.database, connection.log
        self._tables, self._snapshots = connection.tables, connection.snapshots

    def run(self, touched: Iterable[int]) -> None:
        """Everything; ``touched`` are the keys of sessions that have been used."""
        saves = self._connection.unsaved.oldest(SAVES_AT_ONCE)
        if saves or touched or self._is_due():
            self._write(saves, touched)
        self._expire()
        if self._database.num_wal_pages >= CHECKPOINT_PAGES:
            self._database.checkpoint()
        if self._database.pragma("freelist_count") * 4 > self._database.pragma("page_count"):
            self._database.vacuum(VACUUM_PAGES)
        self._forget_idle()

    def save(self) -> None:
        """Brings every value to the disk."""
        self._write(self._connection.unsaved.oldest(None), ())

    def compact(self) -> None:
        """All that `run` does bit by bit, at once and for every session."""
        while self._expire():
            pass
        self._log.changed = self._log.all_heads()
        self.finish()
        self._database.vacuum(0)
        self._database.checkpoint(truncate=True)

    def finish(self) -> None:
        """Everything that would make the next start slower."""
        log = self._log
        with self._database.transaction():
            log.store_tails(
                [h for h in log.heads.values() if h.tail], log.last_row, self._clock.now_s
            )
        self.save()

    @property
    def is_over(self) -> bool:
        """Whether the store has more bytes than it may."""
        if self._limits.max_bytes is None:
            return False
        used = self._database.pragma("page_count") - self._database.pragma("freelist_count")
        num_bytes = used * self._database.pragma("page_size") + self._snapshots.num_bytes()
        return bool(num_bytes > self._limits.max_bytes)

    def _is_due(self) -> bool:
        log = self._log
        is_behind = log.last_row != log.pruned_row
        return bool(is_behind or log.changed or log.unused_files or self._clock.is_due)

    def _write(self, saves: list[Save], touched: Iterable[int]) -> None:
        """States to files first; then all else in one transaction, and then old files go."""
        now_s, log = self._clock.now_s, self._log
        files = self._write_states(saves)
        with self._database.transaction():
            for save, file in zip(saves, files, strict=True):
                num_bytes = self._snapshots.add(
                    save.key, save.place, save.value, file, self._snapshots.identity_key
                )
                self._tables.grow(save.key, num_bytes)
            for key in touched:
                self._tables.touch(key, now_s)
            log.prune(now_s)
            saved = (log.head(save.value.id) for save in saves)
            for head in log.changed.union(head for head in saved if head is not None):
                self._thin(head)
                self._trim(head)
            self._tables.forget_keys(now_s - KEY_RETENTION_S)
            self._database.set_meta("clock_s", now_s)
            unused = self._snapshots.unused(log.unused_files)
        for save, file in zip(saves, files, strict=True):
            self._connection.unsaved.drop(save.value.id)
            if save.value.state is not None:
                save.value.state.file = file
        self._clock.stored()
        self._snapshots.states.remove(unused)
        log.unused_files, log.changed = set(), set()

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

    def _thin(self, head: Head) -> None:
        """Of old snapshots, fewer the older they are."""
        rows = self._snapshots.rows(head.key)
        dropped = superfluous([row.length for row in rows], self._limits.max_snapshots)
        if dropped:
            self._log.drop_snapshots(head, [rows[index] for index in sorted(dropped)])

    def _trim(self, head: Head) -> None:
        """Drops the oldest entries of a log that is too long, and snapshots before them.

        What the two newest snapshots need stays.
        """
        excess = self._tables.log_tokens(head.key) - self._limits.max_log_tokens
        if excess <= 0:
            return
        rows = self._snapshots.rows(head.key)
        needed = rows[-2:][0].place if rows else 0
        place = self._tables.drop_segments(head, excess, needed)
        self._log.drop_snapshots(head, [row for row in rows if row.place < place])

    def _expire(self) -> bool:
        """Deletes what nobody has used for long, as a commit of its own; whether there was any."""
        if self._limits.retention_s is None:
            return False
        before_s = self._clock.now_s - self._limits.retention_s
        due = self._tables.unused_since(before_s, EXPIRED_AT_ONCE)
        heads = self._log.heads
        free = [id for id in due if id not in heads or not heads[id].is_held]
        if free:
            steps = self._log.append([(id, Deleted()) for id in free])
            self._log.settle(steps, self._clock.now_s)
        return bool(free)

    def _forget_idle(self) -> None:
        """Heads that the tables know as well are read again when they are needed."""
        log, unsaved = self._log, self._connection.unsaved
        for head in list(log.heads.values()):
            if not (head.is_held or head.tail or head in log.changed or unsaved.get(head.id)):
                del log.heads[head.id]
