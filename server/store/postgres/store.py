"""The store of many replicas: one PostgreSQL, in which each session belongs to one of them."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeVar

import psycopg

from server.engine.session import Deleted, Record, Saved
from server.errors import SessionNotFound
from server.store.base import (
    Chunk,
    HeldElsewhere,
    Loaded,
    RecordRefused,
    StoreError,
    StoreFailed,
    StoreFull,
)
from server.store.log import Wanted, everyone, recover, without_refused
from server.store.postgres.database import ERRORS, REFUSALS, PostgresDatabase, failure
from server.store.postgres.link import (
    Link,
    Listeners,
    Presence,
    SharedConnection,
    SharedLog,
    SharedPlace,
    channel_name,
    retried_once,
)
from server.store.postgres.objects import AT_ONCE
from server.store.rows import Head
from server.store.sqlite.database import EXPIRED_AT_ONCE
from server.store.states import Save, Unsaved
from server.store.table_store import (
    MAX_UNSAVED_BYTES,
    OVER,
    SAVED_AT_ONCE,
    OfSession,
    Saving,
    StoreClock,
    StoreLimits,
    TableStore,
    loaded,
)

# -------------------------------------------------------------------------------------------------
# Which replica holds a session or a key, and what becomes of what a dead one held.


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
    """A session of no replica becomes this one's, if it can be loaded. Raises `HeldElsewhere`."""
    try:
        # The engine continues with it before the next commit: that it is ours must last.
        with connection.database.transaction():
            while (head := connection.log.take(session, owner)) is None:
                holder, _ = away(connection, session, owner)
                if holder is not None:
                    raise HeldElsewhere(holder)
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


# -------------------------------------------------------------------------------------------------
# What a replica does about once a second for the store that it shares.


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


# -------------------------------------------------------------------------------------------------
# The store thread owns it, as it does an embedded store.


R = TypeVar("R")


class PostgresStore(TableStore):
    """See `server.store.base.Store` for what it does of that.

    A session that another replica has is `HeldElsewhere`. ``presence`` and ``key`` are this
    replica's, of the store that it is connected to.
    """

    durable = True

    def __init__(self, place: SharedPlace, limits: StoreLimits | None = None) -> None:
        super().__init__()
        self._schema = place.schema
        self._limits, self._rounds = limits or StoreLimits(), Rounds()
        self.store_id, self.key = "", 0
        self.presence: Presence | None = None
        self._link = Link(place, self._clock, self._note_connection)
        self._claims = KeyClaims()
        try:
            with self._link.connected():
                pass
        except BaseException:
            self.close()
            raise

    def listen(
        self,
        hear: Callable[[str], None],
        reclaim: Callable[[int], None],
        left: Callable[[int], None] = lambda key: None,
    ) -> None:
        """Calls these in another thread: for others' requests, and when one is dead or left."""
        self._link.listen(Listeners(hear, reclaim, left))

    # What a store does

    @retried_once
    def commit(self, records: Sequence[Record]) -> None:
        with self._link.connected() as connection:
            if self._rounds.is_over and not all(isinstance(entry, Deleted) for _, entry in records):
                raise StoreFull(OVER)
            log = connection.log
            log.now_s = self._clock.now_s
            try:
                steps = log.append(records)
            except REFUSALS as error:  # nothing has changed: the connection is good
                raise RecordRefused(error) from None
            try:
                log.settle(steps, self._clock.now_s)
                left = {h for h, entry, _ in steps if isinstance(entry, Saved) and entry.evicted}
                if left := {head for head in left if log.heads.get(head.id) is head}:
                    self._upkeep.release(list(left))
                if connection.unsaved.num_bytes > MAX_UNSAVED_BYTES:
                    self._upkeep.save(SAVED_AT_ONCE)
            except REFUSALS as error:
                logger.error("reloading the shared store: %s", failure(error).message)
                self._link.skip_refused()
            except (psycopg.Error, StoreError) as error:
                # The commit is in the database, and what follows from it is found there again.
                logger.warning("reloading the shared store: %s", failure(error).message)
                self._link.abandon()

    @retried_once
    def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
        """All of a session is for its holder alone. One that no replica holds is this one's then.

        Raises `HeldElsewhere`.
        """
        with self._link.connected() as connection:
            self._rounds.forgotten.discard(session)
            head = held(connection, session, owner)
            if head is None:
                head, found = taken(connection, session, owner, at)
            else:
                with connection.database.transaction(synced=False):
                    found = loaded(connection, head, (), at)
            self._touched.add(head.key)
            return found

    @retried_once
    def _ask(self, ask: Callable[[SharedConnection], R]) -> R:
        """What the database says, all of one moment."""
        with self._link.connected() as connection, connection.database.reading():
            return ask(connection)

    @retried_once
    def _ask_of(self, session: str, owner: str, ask: OfSession[R]) -> R:
        """Also of a session of another replica; all of one moment."""
        with self._link.connected() as connection:
            head = held(connection, session, owner)
            if head is not None:
                self._touched.add(head.key)
                with connection.database.transaction(synced=False):
                    return ask(connection, head, ())
            with connection.database.reading():
                holder, head = away(connection, session, owner)
                return ask(connection, head, connection.log.entries_away(holder, head))

    @retried_once
    def discard(self, session: str, owner: str) -> None:
        with self._link.connected() as connection, connection.database.transaction():
            head = connection.log.take(session, owner)
            if head is None:
                raise SessionNotFound
            connection.log.delete(head, self._clock.now_s)

    def unfinished(self) -> Sequence[tuple[str, str]]:
        """Those that no other replica has."""

        def ask(connection: SharedConnection) -> Sequence[tuple[str, str]]:
            query = "SELECT id, owner FROM session WHERE running IS NOT NULL AND holder IS NULL"
            owners = dict(connection.database.execute(query).fetchall())
            heads = connection.log.heads.values()
            owners |= {head.id: head.owner for head in heads if head.running is not None}
            return sorted(owners.items())

        return self._ask(ask)

    def named_states(self) -> dict[str, str]:
        """Those of all replicas."""
        query = "SELECT name, digest FROM named_state"
        return self._ask(lambda connection: dict(connection.database.execute(query).fetchall()))

    def read_named(self, name: str) -> bytes | None:
        query = "SELECT data FROM named_state WHERE name = ?"
        rows = self._ask(lambda by: by.database.execute(query, (name,)).fetchall())
        return bytes(rows[0][0]) if rows else None

    @retried_once
    def put_named(self, name: str, digest: str, parts: Sequence[Chunk]) -> None:
        query = (
            "INSERT INTO named_state VALUES (?, ?, ?) ON CONFLICT (name) "
            "DO UPDATE SET digest = excluded.digest, data = excluded.data"
        )
        with self._link.connected() as connection, connection.database.transaction():
            connection.database.execute(query, (name, digest, b"".join(parts)))

    @retried_once
    def drop_named(self, name: str) -> bool:
        query = "DELETE FROM named_state WHERE name = ? RETURNING name"
        with self._link.connected() as connection, connection.database.transaction():
            return bool(connection.database.execute(query, (name,)).fetchall())

    @retried_once
    def maintain(self, now_s: float) -> bool:
        self._clock.advance(now_s)
        with self._link.connected() as connection:
            connection.database.check_fence()
            has_more = self._rounds.turn(self._upkeep, now_s, self._touched)
            self._touched = set()
            self._claims.give_back(connection.database)
        if self._rounds.is_over:
            raise StoreFull(OVER)
        return has_more

    def close(self) -> None:
        """Releases the sessions of this replica."""
        connection = self._link.connection
        if connection is not None:
            try:
                self._upkeep.release([*connection.log.heads.values()])
                database = connection.database
                with database.transaction():
                    database.execute("DELETE FROM journal WHERE replica = ?", (database.me,))
                    database.execute("DELETE FROM replica WHERE key = ?", (database.me,))
            except (*ERRORS, StoreError) as error:
                logger.warning("the session store could not be closed cleanly: %s", error)
        self._link.close()

    def forget(self) -> None:
        """The sessions that the engine had are released, some at a time."""
        self._rounds.forget(self._link.connection)

    def _note_connection(self, connection: SharedConnection) -> None:
        self.store_id, self.presence = self._link.store_id, self._link.presence
        self.key = connection.database.me
        self._upkeep = SharedUpkeep(connection, self._clock, self._limits)
        self._rounds.note_connection(connection)

    # What only a shared store does

    @retried_once
    def release(self, session: str) -> None:
        """Releases a session that the engine does not have; another replica may then acquire it."""
        with self._link.connected():
            self._upkeep.release_if_held([session])

    @retried_once
    def tell(self, key: int, message: str) -> None:
        """What another replica shall hear."""
        with self._link.connected() as connection, connection.database.transaction(synced=False):
            name = channel_name(self._schema, key)
            connection.database.execute("SELECT pg_notify(?, ?)", (name, message))

    @retried_once
    def reclaim(self, key: int) -> bool:
        """Releases everything that a dead replica held; whether it was still there.

        From then on it can neither write nor connect, should it wake.
        """
        with self._link.connected() as connection:
            return reclaim(connection, key, self._clock.now_s)

    @retried_once
    def claim_key(self, owner: str, key: str) -> bool:
        """Whether this replica may begin what comes under ``key``: no other is about to."""
        with self._link.connected() as connection:
            return self._claims.claim(connection.database, owner, key)

    @retried_once
    def give_back_key(self, owner: str, key: str) -> None:
        """After `claim_key`, when what came under it is in the log, or will never be.

        What cannot be given back now is by `maintain`.
        """
        self._claims.note_return(owner, key)
        with self._link.connected() as connection:
            self._claims.give_back(connection.database)

    @retried_once
    def signing_key(self) -> bytes:
        """Made with the store, and the same for all replicas."""
        with self._link.connected() as connection, connection.database.whole():
            key = connection.database.meta_once("signing_key", secrets.token_hex(32))
            return bytes.fromhex(key)
