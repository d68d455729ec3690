"""Reclaims what a dead replica held: its log goes to the tables, then its sessions are free."""

from __future__ import annotations

import logging

from server.store.postgres.database import REFUSALS, failure
from server.store.postgres.link import SharedConnection
from server.store.postgres.log import SharedLog
from server.store.redo import Wanted, everyone, recover
from server.store.sifting import Sifting
from server.store.unsaved import Unsaved

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


def reclaim(connection: SharedConnection, key: int, now_s: float) -> bool:
    """Whether replica ``key`` was still there; from then on it can neither write nor connect."""
    try:
        return _reclaim(connection, key, now_s, sifts=False)
    except REFUSALS as error:
        logger.error("a journal cannot be read in full: %s", failure(error).message)
    return _reclaim(connection, key, now_s, sifts=True)


def _reclaim(connection: SharedConnection, key: int, now_s: float, sifts: bool) -> bool:
    database = connection.database
    with database.transaction(pipelined=not sifts):  # to sift it has parts that fail
        # Not waited for: it is asked again at once, and others wait for this thread.
        lock = "SELECT pg_try_advisory_xact_lock(hashtext(current_schema()), ?::int)"
        if not database.execute(lock, (key,)).fetchall()[0][0]:
            database.execute(_END_STUCK, (key, STUCK_S))
            return False
        gone = database.execute("DELETE FROM replica WHERE key = ? RETURNING key", (key,))
        if not gone.fetchall():
            return False
        log = _recovered(connection, key, now_s, sifts)
        heads = [*log.heads.values()]
        log.disown(heads)
        database.execute("DELETE FROM journal WHERE replica = ?", (key,))
    logger.warning("reclaimed replica %d with %d sessions", key, len(heads))
    return True


def _recovered(connection: SharedConnection, key: int, now_s: float, sifts: bool) -> SharedLog:
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

    return Sifting(database, REFUSALS, read, now_s).run() if sifts else read()
