"""What ties a replica to its store: a connection, made again after an error; a log; presence."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, LiteralString, NamedTuple, ParamSpec, TypeVar

import psycopg
from psycopg import sql

from server.engine.session import Entry, Opened
from server.store.base import (
    Fenced,
    Identity,
    RecordRefused,
    SessionBroken,
    StoreError,
    StoreFailed,
    StoreLost,
)
from server.store.codec import running_after, unpack_entry
from server.store.log import (
    COUNTED,
    JournalRow,
    Log,
    LoggedEntry,
    StoredState,
    Wanted,
    everyone,
    recover,
    unpack_row,
    without_refused,
)
from server.store.postgres.database import (
    CONNECT_TIMEOUT_S,
    ERRORS,
    FENCED,
    REFUSALS,
    START_TIMEOUT_S,
    Hung,
    PostgresDatabase,
    connect,
    failure,
    migrate,
)
from server.store.postgres.objects import Connection, Objects, SharedStates
from server.store.rows import COLUMNS, Head, Tables
from server.store.states import Snapshots, Unsaved
from server.store.table_store import Durability, StoreClock

# -------------------------------------------------------------------------------------------------
# The log of the sessions that one replica holds, in a store that it shares with others.
#
# Each replica has a journal of its own. A session without an owner has no entries in any.

#: Fewer than the embedded store has: a take-over reads them all at once.
MAX_JOURNAL_ROWS = 512
#: Sessions that a replica can make: the other bits of their keys are its own key.
KEY_BITS = 32

LOST = "the database has lost what this replica had committed"

_APPEND = "SELECT append_journal(?, ?, ?, ?, ?, ?, ?)"
_AWAY = f"SELECT holder, {COLUMNS} FROM session WHERE id = ?"  # noqa: S608
_HELD = f"SELECT {COLUMNS} FROM session WHERE holder = ?"  # noqa: S608
_OPENED = "SELECT key FROM session WHERE key >= ? AND key < ?"
_TAKE = f"""
    UPDATE session SET holder = ?, sum = sum + (? - journal), journal = ?
    WHERE id = ? AND owner = ? AND holder IS NULL RETURNING {COLUMNS}
"""  # noqa: S608


class SharedLog(Log):
    """``heads`` are the sessions that the replica ``me`` holds, and no others."""

    max_journal_rows = MAX_JOURNAL_ROWS

    def __init__(
        self,
        database: PostgresDatabase,
        tables: Tables,
        snapshots: Snapshots,
        unsaved: Unsaved,
        me: int,
    ) -> None:
        super().__init__(database, tables, snapshots, unsaved)
        self._shared, self._me = database, me
        self._held_keys: dict[int, Head] = {}
        self.next_key = (me << KEY_BITS) + 1
        self.now_s = 0.0

    def head(self, session: str) -> Head | None:
        """One that this replica holds."""
        return self.heads.get(session)

    # Whose a session is; within a transaction of the caller's

    def take(self, session: str, owner: str) -> Head | None:
        """Gives a session of ``owner`` that no replica holds to this one."""
        # The rows of the journal that it came through were another replica's.
        for row in self._execute(_TAKE, (self._me, self.last_row, self.last_row, session, owner)):
            head = Head.read(row)
            self.heads[head.id] = head
            return head
        return None

    def disown(self, heads: Iterable[Head]) -> None:
        """Gives up ``heads``, whose entries must all be in the tables."""
        gone = list(heads)
        assert not any(head.tail for head in gone), gone
        keys = [head.key for head in gone]
        query = "UPDATE session SET holder = NULL WHERE key = ANY(?) AND holder = ?"
        self._execute(query, (keys, self._me))
        for head in gone:
            self.heads.pop(head.id, None)
            self.changed.discard(head)

    def away(self, session: str) -> tuple[int | None, Head] | None:
        """A session that this replica does not hold, as its tables are, and who holds it."""
        for holder, *row in self._execute(_AWAY, (session,)):
            return holder, Head.read(row)
        return None

    def entries_away(self, holder: int | None, head: Head) -> Iterator[Entry]:
        """What the journal of its holder has of a session, beyond its tables."""
        if holder is None:
            return
        query = "SELECT data, keys FROM journal WHERE replica = ? AND id > ? ORDER BY id"
        running, number = head.running, head.num_entries
        for data, keys in self._execute(query, (holder, head.journal)).fetchall():
            for line in unpack_row(data, keys).of(head.key):
                if not line.is_entry(number):
                    raise SessionBroken
                entry = unpack_entry(line.entry, running)
                number += isinstance(entry, COUNTED)
                running = running_after(entry, running)
                yield entry

    # What differs from a log that has the store for itself

    def _insert_row(self, data: bytes, keys: str, steps: Sequence[LoggedEntry]) -> None:
        """One round trip, unless sessions are new: they are in the tables at once.

        So no journal can bring one back that others have deleted meanwhile.
        """
        new = {step[0]: step for step in steps if isinstance(step[1], Opened)}
        held = {head.key for head, _, _ in steps if head not in new}
        held_keys = "{" + ",".join(map(str, held)) + "}"  # quicker than the library's own list
        shared = self._shared
        number = self.last_row + 1
        row = (self._me, shared.link, number, data, keys, held_keys, shared.is_full)
        if not new:
            _check(self._shared.call("append_journal", row))
            return
        with self._shared.transaction():
            appended = self._execute(_APPEND, row)
            for head, (_, entry, kept) in new.items():
                assert isinstance(entry, Opened), entry
                super()._add_session(head, entry, kept, self.now_s)
            query = "UPDATE session SET holder = ? WHERE key = ANY(?)"
            self._execute(query, (self._me, [head.key for head in new]))
            _check(appended.fetchall()[0][0])

    def _add_session(
        self, head: Head, entry: Opened, kept: StoredState | None, now_s: float
    ) -> None:
        """That has been done with the commit."""

    def head_of_key(self, key: int) -> Head | None:
        return self._held_keys.get(key)

    def running_keys(self) -> list[int]:
        return [key for key, head in self._held_keys.items() if head.running is not None]

    def opened_again(
        self, key: int, packed: Any, row: int, rest: Sequence[Any]
    ) -> LoggedEntry | None:
        return None  # it is gone, or no longer this replica's

    def _drop_rows_before(self, row: int) -> None:
        self._execute("DELETE FROM journal WHERE replica = ? AND id < ?", (self._me, row))

    def rows_up_to(self, last_row: int | None) -> list[JournalRow]:
        if last_row is not None:
            self._undo_opened()
        for row in self._execute(_HELD, (self._me,)).fetchall():
            head = Head.read(row)
            if head.broken is not None:
                self.quarantine(head.key, head.broken)
                continue
            self.heads[head.id] = self._held_keys[head.key] = head
        if last_row is not None:
            self._execute("DELETE FROM journal WHERE replica = ? AND id > ?", (self._me, last_row))
        found = self._rows()
        if last_row and (not found or found[-1][0] != last_row):
            raise Fenced(LOST)
        return found

    def _rows(self) -> list[JournalRow]:
        query = "SELECT id, data, keys FROM journal WHERE replica = ? ORDER BY id"
        found: list[JournalRow] = self._execute(query, (self._me,)).fetchall()
        return found

    def quarantine(self, key: int, why: str) -> str:
        """See `Log.quarantine`. It has no holder from then on."""
        self._execute("UPDATE session SET holder = NULL WHERE key = ?", (key,))
        return super().quarantine(key, why)

    def _undo_opened(self) -> None:
        """Of a commit that has failed for this process, and perhaps not for the database."""
        unknown = (self.next_key, (self._me + 1) << KEY_BITS)
        for (key,) in self._execute(_OPENED, unknown).fetchall():
            self._tables.delete_session(key, self.now_s)


def _check(result: int) -> None:
    if result == 1:
        raise Fenced(FENCED)
    if result == 2:
        raise StoreLost("another replica has one of these sessions")
    if result == 3:
        raise Fenced(LOST)


# -------------------------------------------------------------------------------------------------
# A replica among others: that it lives, whether they do, and what they ask of it.
#
# Each has one connection of its own that does nothing else. It holds an advisory lock,
# which PostgreSQL frees the moment the process is gone, and raises a counter now and
# then. A replica that sees a lock free for `GRACE_S`, or a counter still for a whole lease by
# its own clock, calls that replica dead. A mistake costs a restart and nothing more:
# the key of a replica is a fence that the database itself compares at every commit.
#
# A replica watches its next two neighbours in the ring of keys: however many there are,
# the work of each is the same.


presence_logger = logging.getLogger("everstream.presence")

WATCH_S = 0.1
#: For how long a lock must be free: a connection that broke is there again by then.
GRACE_S = 0.2
#: After the database was away every replica comes back in its own time.
RETRY_S = 0.1

_STORE = "SELECT left(value, 16) FROM {meta} WHERE name = 'store_id'"
_REGISTER = "INSERT INTO {replica} (key, address) VALUES (%s, %s)"
_LOCK = "SELECT pg_advisory_lock(hashtext({schema} || ' live'), %s)"
_BEAT = "UPDATE {replica} SET beat = beat + 1 WHERE key = %s"
_WATCH = """
    SELECT key, beat, pg_try_advisory_xact_lock_shared(hashtext({schema} || ' live'), key::int)
    FROM (SELECT key, beat FROM {replica} WHERE key <> %(me)s ORDER BY key < %(me)s, key LIMIT 2)
    AS neighbour
"""
#: The server may not have noticed yet that an earlier connection of this replica has ended.
_END_EARLIER = """
    SELECT pg_terminate_backend(pid) FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'
        AND classid = hashtext({schema} || ' live')::oid AND objid = %s::int::oid
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND pid <> pg_backend_pid()
"""


class Presence:
    """``key`` is this replica's, in the store ``store_id`` and in no other that takes its place.

    The three listeners are called in a thread of its own.

    ``hear`` gets what others tell this replica, ``reclaim`` the key of one that is dead,
    again and again until it is gone, ``left`` that of one that is no longer a neighbour.
    Raises errors of psycopg's.
    """

    def __init__(
        self,
        url: str,
        schema: str,
        store_id: str,
        address: str,
        lease_s: float,
        timeout_s: int = CONNECT_TIMEOUT_S,
    ) -> None:
        self.hear: Callable[[str], None] = lambda message: None
        self.reclaim: Callable[[int], None] = lambda key: None
        self.left: Callable[[int], None] = lambda key: None
        self._url, self._schema, self._lease_s = url, schema, lease_s
        self.store_id = store_id
        self._closed = threading.Event()
        self._beats: dict[int, tuple[int, float]] = {}
        self._free_since: dict[int, float] = {}
        self._beaten_s = 0.0
        self._beat, self._watch = self._text(_BEAT), self._text(_WATCH)
        connection = self._connect(timeout_s)
        next_key = self._text("SELECT nextval({sequence})")
        self.key = int(connection.execute(next_key).fetchall()[0][0])
        self._enter(connection)
        connection.execute(self._text(_REGISTER), (self.key, address))
        self._first = connection
        self._thread = threading.Thread(
            target=self._run, args=(connection,), name="presence", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Returns when the lock is free, or soon after where the database hangs."""
        self._closed.set()
        if self._thread.ident is None:
            self._first.close()
        else:
            self._thread.join(1.0)

    # The thread

    def _run(self, connection: psycopg.Connection[Any] | None) -> None:
        is_lost = False
        while not self._closed.is_set():
            try:
                if connection is None:
                    connection = self._connect()
                    self._enter(connection)
                self._turn(connection)
                is_lost = False
            except psycopg.Error as error:
                if connection is not None:
                    connection.close()
                connection = None
                self._forget_others()
                if is_lost:  # the first time it is tried again at once
                    self._closed.wait(RETRY_S)
                else:
                    presence_logger.warning(
                        "the shared store is unreachable: %s", str(error).strip()
                    )
                is_lost = True
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    def _connect(self, timeout_s: int = CONNECT_TIMEOUT_S) -> psycopg.Connection[Any]:
        return connect(self._url, timed=False, timeout_s=timeout_s)

    def _enter(self, connection: psycopg.Connection[Any]) -> None:
        """Takes the lock of this replica. Raises an error of psycopg's for another store."""
        if connection.execute(self._text(_STORE)).fetchall() != [(self.store_id,)]:
            # There the same key may be another replica's.
            raise psycopg.OperationalError("the database has another store")
        connection.execute(self._text(_END_EARLIER), (self.key,))
        connection.execute(self._text(_LOCK), (self.key,))
        channel = sql.Identifier(channel_name(self._schema, self.key))
        connection.execute(sql.SQL("LISTEN {}").format(channel))

    def _turn(self, connection: psycopg.Connection[Any]) -> None:
        began_s = time.monotonic()
        for notice in connection.notifies(timeout=WATCH_S):
            self.hear(notice.payload)
            if self._closed.is_set():
                return
        now = time.monotonic()
        if now - self._beaten_s >= self._lease_s / 5:
            self._beaten_s = now
            connection.execute(self._beat, (self.key,))
        self._look(connection, now)
        if time.monotonic() - began_s > self._lease_s / 2:
            self._forget_others()  # the database hung for all, or this process for itself

    def _look(self, connection: psycopg.Connection[Any], now: float) -> None:
        seen = connection.execute(self._watch, {"me": self.key}).fetchall()
        for key in self._beats.keys() - {key for key, _, _ in seen}:
            del self._beats[key]
            self._free_since.pop(key, None)
            self.left(key)  # or another neighbour has come in between
        for key, beat, is_free in seen:
            if self._is_dead(key, beat, is_free, now):
                self.reclaim(key)

    def _is_dead(self, key: int, beat: int, is_free: bool, now: float) -> bool:
        if self._beats.get(key, (None, 0.0))[0] != beat:
            self._beats[key] = beat, now
        if not is_free:
            self._free_since.pop(key, None)
        elif now - self._free_since.setdefault(key, now) >= GRACE_S:
            return True
        return now - self._beats[key][1] >= self._lease_s

    def _forget_others(self) -> None:
        """What was seen before the database was away, or hung, says nothing of now.

        A lock must then be free for a whole lease: its owner may still be on its way.
        """
        later = time.monotonic() + self._lease_s - GRACE_S
        self._free_since = dict.fromkeys(self._beats, later)
        self._beats = {}

    def _text(self, statement: LiteralString) -> sql.Composed:
        return sql.SQL(statement).format(
            schema=sql.Literal(self._schema),
            replica=sql.Identifier(self._schema, "replica"),
            meta=sql.Identifier(self._schema, "meta"),
            sequence=sql.Literal(f'"{self._schema}".replica_key'),
        )


def channel_name(schema: str, key: int) -> str:
    """The name that a notice is sent to."""
    return f"{schema} {key}"


# -------------------------------------------------------------------------------------------------
# After an error the connection is given up, and the next call makes another one, which
# knows only what the database has.


logger = logging.getLogger(__name__)

#: After a connection could not be made.
REST_S = 0.5

#: The connection has gone, or what it was asked has had no effect.
_GONE = (psycopg.OperationalError, psycopg.errors.IdleInTransactionSessionTimeout)

P = ParamSpec("P")
R = TypeVar("R")


def retried_once(method: Callable[P, R]) -> Callable[P, R]:
    """What went with its connection is done again, once.

    A new connection begins with the certainty that nothing more comes of the old one, so
    that a short outage of the database goes unnoticed. It also begins by putting
    into quarantine what the database has refused.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except (StoreFailed, RecordRefused) as error:
            cause = error.__cause__
            if not isinstance(cause, (*_GONE, *REFUSALS)):
                raise
            if isinstance(cause, Hung):
                raise
        return method(*args, **kwargs)

    return call


@dataclass(frozen=True)
class SharedPlace:
    """Where a shared store is: the database's ``url``, and a ``schema`` in it.

    ``direct_url`` leads to the database itself where ``url`` is a pooler's. ``objects``
    opens the place of the states, over a connection for one that is in the database.
    ``address`` is what operators see of the replica.
    """

    url: str
    schema: str
    identity: Identity
    objects: Callable[[Connection], Objects]
    durability: Durability = "full"
    direct_url: str | None = None
    address: str = ""
    lease_s: float = 10.0


class Listeners(NamedTuple):
    """See `Presence`."""

    hear: Callable[[str], None] = lambda message: None
    reclaim: Callable[[int], None] = lambda key: None
    left: Callable[[int], None] = lambda key: None


@dataclass(frozen=True)
class SharedConnection:
    """What is known through one connection; see `server.store.sqlite.store.Connection`."""

    database: PostgresDatabase
    log: SharedLog
    tables: Tables
    snapshots: Snapshots
    states: SharedStates
    unsaved: Unsaved


class Link:
    """``connection`` is the present one, if there is any; ``on_connect`` gets each new one.

    ``store_id`` and ``presence`` are of the store that it leads to, which may become
    another one.
    """

    def __init__(
        self,
        place: SharedPlace,
        clock: StoreClock,
        on_connect: Callable[[SharedConnection], None],
    ) -> None:
        self.store_id = ""
        self.presence: Presence | None = None
        self.connection: SharedConnection | None = None
        self._place, self._clock, self._on_connect = place, clock, on_connect
        self._listeners = Listeners()
        self._unsaved = Unsaved()
        self._last_row: int | None = None
        self._next_key = 0
        self._held: set[str] = set()
        self._end: StoreError | None = None
        self._skips_refused = False
        self._rests_until_s = 0.0

    @contextmanager
    def connected(self) -> Iterator[SharedConnection]:
        """The connection, another one if need be; its errors as those of a store."""
        if self._end is not None:
            raise type(self._end)(self._end.message)
        if self.connection is None and time.monotonic() < self._rests_until_s:
            raise StoreFailed("the shared store failed a moment ago; try again later")
        try:
            yield self.connection or self._connect()
        except Fenced as error:
            self._end = error
            self.abandon()
            raise
        except StoreFailed as error:
            if isinstance(error.__cause__, psycopg.Error):  # of states in a table
                self.abandon()
            raise
        except ERRORS as error:
            self.abandon()
            self._skips_refused = self._skips_refused or isinstance(error, REFUSALS)
            raise failure(error) from error

    def skip_refused(self) -> None:
        """Gives the connection up; the next one finds the sessions whose data are refused."""
        self._skips_refused = True
        self.abandon()

    def abandon(self) -> None:
        """Gives up a connection that may have been wrong about the database."""
        if self.connection is not None:
            log = self.connection.log
            self._last_row, self._next_key = log.last_row, log.next_key
            self._held = {head.id for head in log.heads.values() if head.is_held}
            self.connection.database.close()
            self.connection.states.close()
            self.connection = None

    def listen(self, listeners: Listeners) -> None:
        """The receiver of the notices that the presence gets, and of what it observes."""
        self._listeners = listeners
        if self.presence is not None:
            self.presence.hear, self.presence.reclaim, self.presence.left = listeners

    def close(self) -> None:
        """Ends the connection and the presence; the store cannot be used again."""
        self.abandon()
        if self.presence is not None:
            self.presence.close()
        self._end = self._end or StoreError("the session store is closed")

    @property
    def _timeout_s(self) -> int:
        """How long a connection may take: longer at the start, where nothing else waits."""
        return CONNECT_TIMEOUT_S if self.store_id else START_TIMEOUT_S

    def _connect(self) -> SharedConnection:
        """Whatever waits for this thread must not wait for one attempt after the other."""
        place = self._place
        is_pooled = place.direct_url is not None
        try:
            database = PostgresDatabase(
                place.url,
                place.schema,
                place.durability == "full",
                is_pooled,
                self._timeout_s,
            )
            try:
                connection = self._open(database)
            except BaseException:
                database.close()
                raise
        except BaseException:
            self._rests_until_s = time.monotonic() + REST_S
            raise
        self.connection = connection
        self._on_connect(connection)
        return connection

    def _open(self, database: PostgresDatabase) -> SharedConnection:
        migrate(database)
        with database.whole():
            store_id = database.meta_once("store_id", secrets.token_hex(16))[:16]
        if store_id != self.store_id:
            self._begin_again(store_id)
        assert self.presence is not None
        database.me = self.presence.key
        database.link = _new_link(database)
        tables = Tables(database)
        states = SharedStates(
            database, self._place.objects(database.connection), self._place.identity
        )
        snapshots = Snapshots(database, self._place.identity, states)

        def new_log() -> SharedLog:
            log = SharedLog(database, tables, snapshots, self._unsaved, database.me)
            log.next_key = max(log.next_key, self._next_key)
            return log

        with database.transaction():
            stored_s = float(database.meta("clock_s") or 0.0)
            self._clock.set(max(stored_s, self._clock.now_s))
            snapshots.prepare()
        log = self._recovered(database, new_log)
        if self._skips_refused:
            self._unsaved.clear()  # one of them may be at fault; sessions continue by a replay
            self._skips_refused = False
        for save in self._unsaved.oldest(None):
            if log.head(save.value.id) is None:  # released by a transaction whose answer was lost
                self._unsaved.drop(save.value.id)
        return SharedConnection(database, log, tables, snapshots, states, self._unsaved)

    def _recovered(self, database: PostgresDatabase, new_log: Callable[[], SharedLog]) -> SharedLog:
        """The journal, read as a whole, and session by session where that is refused."""
        last_row, now_s = self._last_row, self._clock.now_s
        held = self._held if last_row is not None else ()

        def read(is_wanted: Wanted = everyone) -> SharedLog:
            return recover(new_log(), last_row, held, now_s, is_wanted)

        if not self._skips_refused:
            with suppress(*REFUSALS), database.transaction():
                return read()
        with database.transaction(pipelined=False):  # it has parts that fail
            return without_refused(database, REFUSALS, read, now_s)

    def _begin_again(self, store_id: str) -> None:
        """Another store, or the first: nothing that was known of an earlier one is true of it."""
        if self.presence is not None:
            self.presence.close()
        place = self._place
        url = place.direct_url or place.url
        self.presence = Presence(
            *(url, place.schema, store_id, place.address, place.lease_s), self._timeout_s
        )
        self.listen(self._listeners)
        self.presence.start()
        self._unsaved.clear()
        self._last_row, self._next_key = None, 0
        self.store_id = store_id


def _new_link(database: PostgresDatabase) -> int:
    """This connection's number: what an earlier one has not done by now it never will.

    Raises `Fenced`.
    """
    with database.whole():
        lock = "SELECT pg_advisory_xact_lock(hashtext(current_schema()), ?::int)"
        database.execute(lock, (database.me,))
        query = "UPDATE replica SET link = link + 1 WHERE key = ? RETURNING link"
        for (link,) in database.execute(query, (database.me,)):
            return int(link)
    raise Fenced(FENCED)
