"""What a replica does about once a second for the store that it shares."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from itertools import islice

from server.store.errors import StoreFailed
from server.store.heads import Head
from server.store.postgres.link import SharedConnection
from server.store.postgres.states import AT_ONCE
from server.store.saving import Saving, StoreClock, StoreLimits
from server.store.snapshots import Save
from server.store.sqlite.upkeep import EXPIRED_AT_ONCE

logger = logging.getLogger(__name__)

#: States written at a time, so that commits do not wait long: with the store thread's ``SOON_S``
#: and the settings' ``SHARED_SAVE_INTERVAL``, those of 6,400 tokens/s.
SAVES_AT_ONCE = 2
#: Sessions whose logs and snapshots are cut at a time.
CHANGED_AT_ONCE = 16
#: How often sessions are looked for that have not been used for long.
ROUND_S = 1.0
#: How often unused states are looked for.
SWEEP_S = 10.0
#: How often the bytes of all sessions are counted.
RARELY_S = 60.0
#: Sessions that are written and released in one transaction, after the engine has forgotten all.
RELEASED_AT_ONCE = 32

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

    def run(self, touched: set[int]) -> bool:
        """What is due now; ``touched`` are the keys of sessions that have been used.

        Returns whether something of it is left to do.
        """
        touched = touched & {head.key for head in self._log.heads.values()}
        unsaved, changed = self._connection.unsaved, self._log.changed
        saves = unsaved.oldest(SAVES_AT_ONCE)
        if saves or touched or self._is_due():
            self._write(saves, touched, CHANGED_AT_ONCE)
        return bool(unsaved.oldest(1) or changed)

    def release(self, heads: list[Head]) -> None:
        """Writes everything that is unsaved of these sessions, and releases them."""
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

    def release_if_held(self, sessions: Iterable[str]) -> None:
        """`release` for those that this replica holds."""
        heads = [head for id in sessions if (head := self._log.head(id)) is not None]
        if heads:
            self.release(heads)

    def sweep(self) -> bool:
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


class Rounds:
    """When it is due, from one connection to the next.

    ``forgotten`` are sessions that the engine does not have any more and that this replica
    still holds. ``is_over``: the store has more bytes than it may.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.forgotten: set[str] = set()
        self._round_s = self._sweep_s = self._rarely_s = -math.inf
        self._has_garbage = self._forgets = False

    def turn(self, upkeep: SharedUpkeep, now_s: float, touched: set[int]) -> bool:
        """All that is due now; whether there is more to write.

        ``touched`` are the keys of the sessions that were used since the last one.
        """
        has_more = upkeep.run(touched)
        if now_s - self._round_s >= ROUND_S:
            self._round_s = now_s
            upkeep.expire()
        if now_s - self._rarely_s >= RARELY_S:
            self._rarely_s = now_s
            self.is_over = upkeep.measure()
        if now_s - self._sweep_s >= SWEEP_S:
            self._sweep_s, self._has_garbage = now_s, True
        self._has_garbage = self._has_garbage and upkeep.sweep()
        some = [*islice(self.forgotten, RELEASED_AT_ONCE)]  # so that no commit waits for all
        upkeep.release_if_held(some)
        self.forgotten.difference_update(some)
        return has_more

    def forget(self, connection: SharedConnection | None) -> None:
        """The engine has forgotten all that this replica holds."""
        self._forgets = True
        if connection is not None:
            self.note_connection(connection)

    def note_connection(self, connection: SharedConnection) -> None:
        """What was forgotten while there was no connection is known with the next one."""
        if self._forgets:
            self.forgotten |= connection.log.heads.keys()
            self._forgets = False
