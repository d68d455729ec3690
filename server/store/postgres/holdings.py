"""Which replica holds a session or a key, and what becomes of what a dead one held."""

from __future__ import annotations

import logging

from server.errors import SessionNotFound
from server.store.base import Loaded
from server.store.errors import OwnedElsewhere
from server.store.heads import Head
from server.store.postgres.database import REFUSALS, PostgresDatabase, failure
from server.store.postgres.link import SharedConnection
from server.store.postgres.log import SharedLog
from server.store.redo import Wanted, everyone, recover, without_refused
from server.store.snapshots import Unsaved
from server.store.table_store import loaded

logger = logging.getLogger(__name__)

#: Logs of a dead replica's sessions that go to the tables in one round trip.
STORED_AT_ONCE = 256

#: A replica that was stopped in the middle of a pipeline is waited for without a limit by
#: the database itself. Between two statements none of ours takes so long; to take over what
#: a dead one had, with many of them, another replica may.
STUCK_S = 5
_END_STUCK = """
    SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND granted AND classid = hashtext(current_schema())::oid
        AND objid = ?::int::oid AND state_change < clock_timestamp() - make_interval(secs => ?)
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

_CLAIM = (
    "INSERT INTO key_claim VALUES (?, ?, ?) ON CONFLICT (owner, key) DO UPDATE "
    "SET replica = excluded.replica WHERE key_claim.replica = excluded.replica "
    "RETURNING key"
)
_RETURN = "DELETE FROM key_claim WHERE owner = ? AND key = ? AND replica = ?"


def held(connection: SharedConnection, session: str, owner: str) -> Head | None:
    """The session, where this replica holds it. Raises `SessionNotFound` for another owner's."""
    head = connection.log.head(session)
    if head is not None and head.owner != owner:
        raise SessionNotFound
    return head


def away(connection: SharedConnection, session: str, owner: str) -> tuple[int | None, Head]:
    """Who holds a session that this replica does not, and how its tables are."""
    found = connection.log.away(session)
    if found is None or found[1].owner != owner:
        raise SessionNotFound
    return found


def taken(
    connection: SharedConnection, session: str, owner: str, at: int | None
) -> tuple[Head, Loaded]:
    """A session of no replica becomes this one's, if it can be loaded. Raises `OwnedElsewhere`."""
    try:
        # The engine continues with it before the next commit: that it is ours must last.
        with connection.database.transaction():
            while (head := connection.log.take(session, owner)) is None:
                holder, _ = away(connection, session, owner)
                if holder is not None:
                    raise OwnedElsewhere(holder)
            return head, loaded(connection, head, (), at)
    except BaseException:
        connection.log.heads.pop(session, None)
        raise


def reclaim(connection: SharedConnection, key: int, now_s: float) -> bool:
    """Whether replica ``key`` was still there; from then on it can neither write nor connect."""
    try:
        return _reclaim(connection, key, now_s, skips_refused=False)
    except REFUSALS as error:
        logger.error("a journal cannot be read in full: %s", failure(error).message)
    return _reclaim(connection, key, now_s, skips_refused=True)


def _reclaim(connection: SharedConnection, key: int, now_s: float, skips_refused: bool) -> bool:
    database = connection.database
    with database.transaction(pipelined=not skips_refused):  # then it has parts that fail
        # Not waited for: it is asked again at once, and others wait for this thread.
        lock = "SELECT pg_try_advisory_xact_lock(hashtext(current_schema()), ?::int)"
        if not database.execute(lock, (key,)).fetchall()[0][0]:
            database.execute(_END_STUCK, (key, STUCK_S))
            return False
        gone = database.execute("DELETE FROM replica WHERE key = ? RETURNING key", (key,))
        if not gone.fetchall():
            return False
        log = _recovered(connection, key, now_s, skips_refused)
        heads = [*log.heads.values()]
        log.disown(heads)
        database.execute("DELETE FROM journal WHERE replica = ?", (key,))
    logger.warning("reclaimed replica %d with %d sessions", key, len(heads))
    return True


def _recovered(
    connection: SharedConnection, key: int, now_s: float, skips_refused: bool
) -> SharedLog:
    """What a dead replica has held, after all of its journal is in the tables."""
    database = connection.database

    def read(is_wanted: Wanted = everyone) -> SharedLog:
        log = SharedLog(database, connection.tables, connection.snapshots, Unsaved(), key)
        recover(log, None, (), now_s, is_wanted)
        tails = [head for head in log.heads.values() if head.tail]
        for start in range(0, len(tails), STORED_AT_ONCE):
            log.store_tails(tails[start : start + STORED_AT_ONCE], log.last_row, now_s)
            database.execute("SELECT 1").fetchall()  # a pipeline must not take too long
        return log

    return without_refused(database, REFUSALS, read, now_s) if skips_refused else read()


class KeyClaims:
    """Those of one replica. Each method is a transaction."""

    def __init__(self) -> None:
        self._unreturned: set[tuple[str, str]] = set()

    def claim(self, database: PostgresDatabase, owner: str, key: str) -> bool:
        """Whether this replica may begin what comes under ``key``: no other is about to."""
        with database.transaction():
            self._unreturned.discard((owner, key))
            return bool(database.execute(_CLAIM, (owner, key, database.me)).fetchall())

    def note_return(self, owner: str, key: str) -> None:
        """What came under the key is in the log, or will never be: for `give_back`."""
        self._unreturned.add((owner, key))

    def give_back(self, database: PostgresDatabase) -> None:
        """All that was noted."""
        if not self._unreturned:
            return
        with database.transaction(synced=False):
            for owner, key in self._unreturned:
                database.execute(_RETURN, (owner, key, database.me))
        self._unreturned.clear()
