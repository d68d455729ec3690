"""What a replica does about once a second for the store that it shares."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from server.store.clock import StoreClock
from server.store.errors import StoreFailed
from server.store.heads import Head
from server.store.postgres.link import SharedConnection
from server.store.postgres.states import AT_ONCE
from server.store.saving import Saving, StoreLimits
from server.store.sqlite.upkeep import EXPIRED_AT_ONCE
from server.store.unsaved import Save

logger = logging.getLogger(__name__)

#: States written at a time, so that commits do not wait long: with the store thread's ``SOON_S``
#: and the settings' ``SHARED_SAVE_INTERVAL``, those of 6,400 tokens/s.
SAVES_AT_ONCE = 2
#: Sessions whose logs and snapshots are cut at a time.
CHANGED_AT_ONCE = 16

_EXPIRE = """
    UPDATE session SET holder = ? WHERE key IN (
        SELECT key FROM session WHERE used_s < ? AND running IS NULL AND holder IS NULL
        LIMIT ? FOR UPDATE SKIP LOCKED
    ) RETURNING key
"""

_NOTE_TIME = """
    INSERT INTO meta AS had VALUES ('clock_s', ?) ON CONFLICT (name) DO UPDATE
    SET value = greatest(had.value::float, excluded.value::float)::text
"""


class SharedUpkeep(Saving):
    """The round for the sessions that this replica holds, and its share of the others.

    Nothing of it is synced by itself: the database syncs all commits in their order, and
    what a crash loses of it is found in the journal.
    """

    is_synced = False

    def __init__(
        self, connection: SharedConnection, clock: StoreClock, limits: StoreLimits
    ) -> None:
        super().__init__(connection, clock, limits)
        self._shared = connection

    def run(self, touched: Iterable[int]) -> bool:
        """What is due now; ``touched`` are the keys of sessions that have been used.

        Returns whether something of it is left to do.
        """
        unsaved, changed = self._connection.unsaved, self._log.changed
        saves = unsaved.oldest(SAVES_AT_ONCE)
        if saves or touched or self._is_due():
            self._write(saves, touched, CHANGED_AT_ONCE)
        return bool(unsaved.oldest(1) or changed)

    def release(self, heads: list[Head]) -> None:
        """Writes all that there is of these sessions, and lets them go."""
        log, unsaved = self._shared.log, self._connection.unsaved
        found = (unsaved.get(head.id) for head in heads)
        saves: list[Save] = [save for save in found if save is not None]
        files = self._write_states(saves)
        with self._shared.database.transaction(synced=False):
            log.store_tails([h for h in heads if h.tail], log.last_row, self._clock.now_s)
            self._add_rows(saves, files)
            saved = {save.key for save in saves}
            self._shorten([h for h in heads if h in log.changed or h.key in saved])
            log.disown(heads)
        self._saved(saves, files)

    def take_out_garbage(self) -> bool:
        """Deletes states that were put, or dropped, and that no row names; whether more are due."""
        try:
            return self._shared.states.sweep() >= AT_ONCE
        except StoreFailed as error:  # it is done the next time
            logger.warning("unused states could not be deleted: %s", error.message)
            return False

    def measure(self) -> bool:
        """Whether the store has more bytes than it may."""
        if self._limits.max_bytes is None:
            return False
        with self._shared.database.reading():
            found = self._shared.database.execute("SELECT coalesce(sum(bytes), 0) FROM session")
            return int(found.fetchall()[0][0]) > self._limits.max_bytes

    def _note_time(self, now_s: float) -> None:
        """Not at every turn: it is one row for all replicas."""
        if self._clock.is_due:
            self._shared.database.execute(_NOTE_TIME, (str(now_s),))
            self._clock.stored()

    def expire(self) -> None:
        """Deletes some of what was unused for long."""
        if self._limits.retention_s is None:
            return
        before_s = self._clock.now_s - self._limits.retention_s
        with self._shared.database.transaction(synced=False):
            wanted = (self._shared.database.me, before_s, EXPIRED_AT_ONCE)
            keys = [key for (key,) in self._shared.database.execute(_EXPIRE, wanted).fetchall()]
            for key in keys:
                self._tables.delete_session(key, self._clock.now_s)
