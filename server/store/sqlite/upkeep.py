"""What a store does about once a second, besides what it is asked: saving, thinning, expiring."""

from __future__ import annotations

from collections.abc import Iterable

from server.engine.value import Deleted
from server.store.saving import Connected, Saving, StoreClock, StoreLimits
from server.store.sqlite.database import SqliteDatabase

#: State files written at a time, so that commits do not wait long. With more of them to write
#: the next turn comes soon: see `server.runtime.store_thread.SOON_S`.
SAVES_AT_ONCE = 8
EXPIRED_AT_ONCE = 100
CHECKPOINT_PAGES = 500
VACUUM_PAGES = 500


class Upkeep(Saving):
    """One round of it, on one connection. An error leaves the connection useless."""

    def __init__(
        self,
        connection: Connected,
        database: SqliteDatabase,
        clock: StoreClock,
        limits: StoreLimits,
    ) -> None:
        super().__init__(connection, clock, limits)
        self._database = database

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

    def compact(self) -> None:
        """All that `run` does bit by bit, at once and for every session."""
        while self._expire():
            pass
        ids = self._database.execute("SELECT id FROM session").fetchall()
        heads = (self._log.head(str(id)) for (id,) in ids)
        self._log.changed = {head for head in heads if head is not None}
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

    def _expire(self) -> bool:
        """Deletes what was unused for long, as a commit of its own; whether there was any."""
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
