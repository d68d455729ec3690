"""PostgreSQL: connections that end in time, fenced transactions, tables of a shared store."""

from __future__ import annotations

import errno
import hashlib
import select
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.waiting import Ready, Wait

from server.store.base import Fenced, RecordRefused, StoreError, StoreFailed, StoreFull
from server.store.codec import UNSTORABLE
from server.store.rows import FOURTH, SECOND, TABLES, THIRD, refuse_unknown

# -------------------------------------------------------------------------------------------------
# A connection to PostgreSQL that ends in time, whatever becomes of the database.


#: Nothing that a store asks takes so long, unless the database hangs.
TIMEOUT_S = 2.5
#: A process that is stopped while it waits, or that gets no processor, loses so much of it.
SLICE_S = 0.25
CONNECT_TIMEOUT_S = 2
#: At the start nothing waits but the start itself, and the database may be starting too.
START_TIMEOUT_S = 15


class Hung(psycopg.OperationalError):
    """No answer came in time."""


class _Timed(psycopg.Connection[tuple[Any, ...]]):
    """A connection that waits for `TIMEOUT_S` at most, whatever the database does.

    For a statement, or for all that a pipeline has sent.
    """

    def wait(
        self, gen: Generator[Any, Any, Any], interval: float = 0.0, timeout: float | None = None
    ) -> Any:
        """Runs ``gen`` to its end. Raises `psycopg.OperationalError` after the time.

        Only time within waits counts, of each wait a slice at most: the database may have
        answered, or have been asked nothing yet, while this process was stopped.
        """
        left_s = TIMEOUT_S if timeout is None else timeout
        poll, fd = select.poll(), self.pgconn.socket
        try:
            wanted = next(gen)
            while True:
                reads = select.POLLIN if wanted & Wait.R else 0
                poll.register(fd, reads | (select.POLLOUT if wanted & Wait.W else 0))
                found: list[tuple[int, int]] = []
                while not found:
                    began_s = time.monotonic()
                    found = poll.poll(max(0.0, min(left_s, SLICE_S)) * 1000)
                    left_s -= min(time.monotonic() - began_s, SLICE_S)
                    if not found and left_s <= 0:
                        self.pgconn.finish()  # whatever it still answers is of no use
                        raise Hung("the database does not answer")
                events = found[0][1]  # an error is for the next read to find
                ready = Ready.R if events & ~select.POLLOUT else Ready.NONE
                wanted = gen.send(Ready(ready | (Ready.W if events & select.POLLOUT else 0)))
        except StopIteration as end:
            return end.value


def connect(
    url: str, *, prepare: bool = True, timed: bool = True, timeout_s: int = CONNECT_TIMEOUT_S
) -> psycopg.Connection[Any]:
    """A connection that is noticed to be dead. Raises errors of psycopg's."""
    kind = _Timed if timed else psycopg.Connection
    try:
        conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise StoreFailed("the URL of the shared store cannot be read") from None
    return kind.connect(
        url,
        autocommit=True,
        prepare_threshold=2 if prepare else None,
        connect_timeout=timeout_s,
        keepalives_idle=5,
        keepalives_interval=2,
        keepalives_count=3,
        tcp_user_timeout=10_000,
        application_name="everstream",
    )


# -------------------------------------------------------------------------------------------------
# One connection to PostgreSQL: transactions that are fenced, and statements in pipelines.
#
# The SQL of `server.store` is written for both databases, with a question mark for each
# parameter. Every transaction names its schema, so that a pooler may stand in between.


#: So that a replica that was stopped or cut off in a transaction delays the others only briefly.
_LIMITS = {
    "idle_in_transaction_session_timeout": "3000",
    "lock_timeout": "2000",
    "statement_timeout": "5000",
}
#: What `must_hold` of the schema raises.
_FENCED_STATE = "EV001"
_WRITING = b"BEGIN ISOLATION LEVEL READ COMMITTED"
_READING = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_IN_TRANSACTION = (TransactionStatus.INTRANS, TransactionStatus.INERROR)
FENCED = "another replica has taken over what this one had"


class _Cursor(psycopg.Cursor[tuple[Any, ...]]):
    """Its rows are asked for by ``sync``, where the statement is in a pipeline."""

    sync: Callable[[], None]

    def fetchone(self) -> tuple[Any, ...] | None:
        self.sync()
        return super().fetchone()

    def fetchall(self) -> list[tuple[Any, ...]]:
        self.sync()
        return super().fetchall()

    def __iter__(self) -> Self:
        self.sync()
        return super().__iter__()


class PostgresDatabase:
    """A connection for one thread, to the schema called ``schema``.

    ``is_full``: a commit outlasts a crash of the database. Raises errors of psycopg's
    where there is no connection. ``me`` and ``link`` are the replica that it writes for, once
    that is known.
    """

    def __init__(
        self,
        url: str,
        schema: str,
        is_full: bool,
        is_pooled: bool = False,
        timeout_s: int = CONNECT_TIMEOUT_S,
    ) -> None:
        self.schema = schema
        self.me = self.link = 0
        self.is_full = is_full
        self._is_pooled = is_pooled
        self._is_within = self._is_pending = False
        self._pipeline: psycopg.Pipeline | None = None
        self._connection = connect(url, prepare=not is_pooled, timeout_s=timeout_s)
        path = sql.Identifier(schema).as_string(self._connection)
        self._settings = {"search_path": path, **_LIMITS}
        self._cursor = self._connection.cursor()

    # Asking

    def execute(self, query: str, parameters: Sequence[object] = ()) -> psycopg.Cursor[Any]:
        """A statement in the transaction, or one of its own; the rows are read already."""
        if not self._is_within:
            with self.whole():
                return self.execute(query, parameters)
        cursor = _Cursor(self._connection)
        cursor.sync = self._sync
        cursor.execute(translated(query), parameters)
        self._is_pending = True
        return cursor

    def _sync(self) -> None:
        """Waits for all that has been sent. The database's limits of time run from then on."""
        if self._pipeline is not None and self._is_pending:
            self._is_pending = False
            self._pipeline.sync()

    def call(self, function: str, parameters: Sequence[object]) -> Any:
        """What a function of the schema returns, in one round trip and a transaction of its own."""
        places = ", ".join(["%s"] * len(parameters))
        self._cursor.execute(_call(self.schema, function, places), parameters)
        row = self._cursor.fetchone()
        return row and row[0]

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """For what must be in the same transaction."""
        return self._connection

    def run(self, statements: str) -> None:
        """Statements without parameters and results, where there is no pipeline."""
        self._connection.execute(statements)

    # Transactions

    @contextmanager
    def transaction(self, synced: bool = True, pipelined: bool = True) -> Iterator[None]:
        """All of it or nothing, and only for a replica that is still one.

        Raises `Fenced`. What is not ``synced`` may be lost with what comes after it. Of that
        a connection tells, which ends with the database; a pooler's does not. ``pipelined``:
        see `_within`.
        """
        synced = synced or self._is_pooled
        lazy: dict[str, str] = {}
        if not (synced and self.is_full):
            lazy = {"synchronous_commit": "off"}
        with self._within(_WRITING, lazy, pipelined):
            self.execute("SELECT must_hold(?, ?)", (self.me, self.link))
            yield

    @contextmanager
    def whole(self, pipelined: bool = True) -> Iterator[None]:
        """A transaction for no replica."""
        with self._within(_WRITING, {}, pipelined):
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """All that is read is of one moment."""
        with self._within(_READING, {}, pipelined=True):
            yield

    @contextmanager
    def _within(self, begin: bytes, more: dict[str, str], pipelined: bool) -> Iterator[None]:
        """A transaction, for which everything of a schema is found by its name.

        In a pipeline a statement is waited for when its rows are asked for, or at the end: so
        all that is only written takes one round trip, with the begin and the commit. An error
        is raised there too.
        """
        assert not self._is_within, "a transaction within another"
        pipeline = self._connection.pipeline() if pipelined else nullcontext()
        self._is_within = True
        try:
            with pipeline as self._pipeline:
                self._connection.execute(begin)
                settings = self._settings | more
                set_all = ", ".join(["set_config(%s, %s, true)"] * len(settings))
                parameters = [part for each in settings.items() for part in each]
                self._connection.execute(f"SELECT {set_all}".encode(), parameters)
                yield
                self._connection.execute(b"COMMIT")
        except BaseException as error:
            if not self._connection.broken:
                with suppress(psycopg.Error):
                    self._connection.execute("ROLLBACK")
            if isinstance(error, psycopg.Error) and error.sqlstate == _FENCED_STATE:
                raise Fenced(FENCED) from error
            raise
        finally:
            self._is_within, self._pipeline = False, None

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A part of a transaction of the caller's, which has no pipeline: all of it or nothing."""
        self.execute("SAVEPOINT part")
        try:
            yield
        except BaseException:
            if self._connection.pgconn.transaction_status in _IN_TRANSACTION:
                self.run("ROLLBACK TO SAVEPOINT part; RELEASE SAVEPOINT part")
            raise
        self.execute("RELEASE SAVEPOINT part")

    def check_fence(self) -> None:
        """Raises `Fenced`."""
        if not self.call("hold", (self.me, self.link)):
            raise Fenced(FENCED)

    # The schema

    def make_schema(self) -> None:
        name = sql.Identifier(self.schema)
        self._connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))

    def has_tables(self) -> bool:
        return self.execute("SELECT to_regclass('meta') IS NOT NULL").fetchall()[0][0] is True

    def meta(self, name: str) -> str | None:
        """A value that the store remembers, or None."""
        for (value,) in self.execute("SELECT value FROM meta WHERE name = ?", (name,)):
            return str(value)
        return None

    def set_meta(self, name: str, value: object) -> None:
        """Has the store remember ``value``."""
        query = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = ?"
        self.execute(query, (name, str(value), str(value)))

    def meta_once(self, name: str, value: str) -> str:
        """What the store remembers: ``value``, unless it had another one already."""
        self.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT DO NOTHING", (name, value))
        return str(self.meta(name))

    def close(self) -> None:
        self._connection.close()


@cache
def translated(query: str) -> Any:
    """``query`` as psycopg wants it. None of ours has a percent sign or a quoted question mark."""
    assert "%" not in query, query
    return query.replace("?", "%s").encode()


@cache
def _call(schema: str, function: str, places: str) -> sql.Composed:
    name = sql.Identifier(schema, function)
    return sql.SQL("SELECT {}({})").format(name, sql.SQL(places))


#: What the statements were about is at fault, and not the database: others are done.
REFUSALS = (
    *UNSTORABLE,
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.errors.ProgramLimitExceeded,
)
#: All that can go wrong on a connection.
ERRORS = (psycopg.Error, OSError, *REFUSALS)


def failure(error: Exception) -> StoreError:
    """What an error of PostgreSQL, or on the way to it, means."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, REFUSALS):
        return RecordRefused(error)
    no_room = isinstance(error, psycopg.errors.DiskFull)
    if no_room or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("the disk of the shared store is full; try again later")
    return StoreFailed("the shared store failed", detail=str(error).strip().partition("\n")[0])


# -------------------------------------------------------------------------------------------------
# The tables of a shared store, and how a store of an older format gets them.
#
# Each version of a model has a schema of its own in the database, so that the tables
# are those of the embedded store, with these columns and tables next to them:
#
# - `replica` has a row for each process that serves. Its key is a number that no other
#   process ever gets, and so the fence of all that the process holds. ``link`` counts
#   its connections: what an older one still sends is refused.
# - ``session.holder`` is the only replica that may append to a session. NULL: the session has
#   no owner, and any replica may acquire it.
# - ``append_journal`` compares both in the transaction that appends.


_TYPES = {
    "integer": "bigint",
    "text": "text",
    "real": "double precision",
    "blob": "bytea",
    "row_key": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "session_key": "bigint PRIMARY KEY",
    "end": "",
    "end_by_key": "",
}

_REPLICAS = """
    CREATE TABLE meta (name text PRIMARY KEY, value text NOT NULL);

    CREATE TABLE replica (
        key bigint PRIMARY KEY,
        link bigint NOT NULL DEFAULT 0,
        beat bigint NOT NULL DEFAULT 0,
        address text NOT NULL
    );
    CREATE SEQUENCE replica_key MAXVALUE 2147483647;

    -- One row for each commit of a replica; `keys` are those of its sessions.
    CREATE TABLE journal (
        replica bigint NOT NULL,
        id bigint NOT NULL,
        data bytea NOT NULL,
        keys text NOT NULL,
        PRIMARY KEY (replica, id)
    );

    ALTER TABLE session ADD COLUMN holder bigint, SET (fillfactor = 80);
    CREATE INDEX session_holder ON session (holder) WHERE holder IS NOT NULL;

    -- Keys under which a replica is about to begin something.
    CREATE TABLE key_claim (
        owner text NOT NULL,
        key text NOT NULL,
        replica bigint NOT NULL REFERENCES replica ON DELETE CASCADE,
        PRIMARY KEY (owner, key)
    );
    CREATE INDEX key_claim_replica ON key_claim (replica);

    -- Whether a replica may write through its connection number `my_link`, until the transaction
    -- ends: another process that ends the replica, or connects anew for it, waits for that.
    CREATE FUNCTION hold(me bigint, my_link bigint) RETURNS boolean
    LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock_shared(hashtext(current_schema()), me::int);
        RETURN EXISTS (SELECT FROM replica WHERE key = me AND link = my_link);
    END $$;

    -- `hold`, where nothing waits for its answer.
    CREATE FUNCTION must_hold(me bigint, my_link bigint) RETURNS void
    LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
    BEGIN
        IF NOT hold(me, my_link) THEN
            RAISE EXCEPTION 'the replica is no more' USING ERRCODE = 'EV001';
        END IF;
    END $$;

    -- 0: done. 1: the replica is no more. 2: it does not hold all of the sessions `held`.
    -- 3: the row before is not there: this is not the database that it was.
    CREATE FUNCTION append_journal(
        me bigint, my_link bigint, row_id bigint, row_data bytea, row_keys text, held bigint[],
        synced boolean
    ) RETURNS int LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '2s' AS $$
    BEGIN
        IF NOT hold(me, my_link) THEN
            RETURN 1;
        END IF;
        IF cardinality(held) > (
            SELECT count(*) FROM session WHERE key = ANY(held) AND holder = me
        ) THEN
            RETURN 2;
        END IF;
        IF row_id > 1 AND NOT EXISTS (
            SELECT FROM journal WHERE replica = me AND id = row_id - 1
        ) THEN
            RETURN 3;
        END IF;
        IF NOT synced THEN
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
        INSERT INTO journal VALUES (me, row_id, row_data, row_keys);
        RETURN 0;
    END $$;
"""

_STATES = """
    -- States, where no object storage has them. They are random to any compression. The space
    -- of deleted ones is used again soon: a state is hundreds of rows of the second table.
    CREATE TABLE object (name text PRIMARY KEY, data bytea NOT NULL) WITH (
        autovacuum_vacuum_scale_factor = 0.05,
        toast.autovacuum_vacuum_scale_factor = 0.05,
        toast.autovacuum_vacuum_threshold = 1000,
        toast.autovacuum_vacuum_cost_delay = 0
    );
    ALTER TABLE object ALTER COLUMN data SET STORAGE EXTERNAL;

    -- States that may have no row that names them, to be looked at when they are due.
    CREATE TABLE garbage (name text PRIMARY KEY, due_s double precision NOT NULL);
    CREATE INDEX garbage_due ON garbage (due_s);

    -- A state in the table can go as soon as its last row has gone: both are of one database, so
    -- that neither a crash nor a dump finds a row without its state. A row that is just being
    -- made for it is kept from that by `keep_state`. One in an object storage waits for an hour:
    -- that of before a crash, or a dump, may still be asked for.
    CREATE FUNCTION note_garbage() RETURNS trigger
    LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
    BEGIN
        INSERT INTO garbage VALUES (
            OLD.file, extract(epoch FROM now())
                + CASE WHEN starts_with(OLD.file, 'table-') THEN 0 ELSE 3600 END
        ) ON CONFLICT (name) DO UPDATE SET due_s = excluded.due_s;
        RETURN NULL;
    END $$;
    CREATE TRIGGER snapshot_gone AFTER DELETE ON snapshot
        FOR EACH ROW WHEN (OLD.file IS NOT NULL) EXECUTE FUNCTION note_garbage();

    -- The note is what a sweep locks. One that goes on is waited for here; its state is gone then,
    -- and the transaction is done once more, with a state of its own.
    CREATE FUNCTION keep_state() RETURNS trigger
    LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
    BEGIN
        INSERT INTO garbage VALUES (NEW.file, extract(epoch FROM now()) + 3600)
            ON CONFLICT (name) DO UPDATE SET due_s = excluded.due_s;
        IF NOT EXISTS (SELECT FROM object WHERE name = NEW.file) THEN
            RAISE EXCEPTION 'the state of a snapshot is gone' USING ERRCODE = '40001';
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER snapshot_state BEFORE INSERT ON snapshot
        FOR EACH ROW WHEN (starts_with(NEW.file, 'table-')) EXECUTE FUNCTION keep_state();

    -- States of the beginnings of prompts, shared by the replicas.
    CREATE TABLE prefix (
        space text NOT NULL,
        owner text NOT NULL,
        key text NOT NULL,
        num_tokens bigint NOT NULL,
        name text NOT NULL,
        bytes bigint NOT NULL,
        used_s double precision NOT NULL,
        PRIMARY KEY (space, owner, key)
    );
    CREATE INDEX prefix_used ON prefix (used_s);

    -- States that sessions begin with, by the operator's names. `data` is a file with a checksum.
    CREATE TABLE named_state (name text PRIMARY KEY, digest text NOT NULL, data bytea NOT NULL);
    ALTER TABLE named_state ALTER COLUMN data SET STORAGE EXTERNAL;
"""

#: ``MIGRATIONS[i]`` leads from format i to format i + 1. Those of a release never change.
MIGRATIONS: tuple[str, ...] = (
    *(TABLES.format(**_TYPES) + _REPLICAS + _STATES, SECOND, THIRD, FOURTH),
)


def migrate(database: PostgresDatabase) -> None:
    """Brings the schema to this version, all of it or nothing, one replica at a time.

    Raises `StoreTooNew` where a newer version of everstream has written it.
    """
    with database.whole():
        if _version(database) == len(MIGRATIONS):
            return
    with database.whole(pipelined=False):
        database.run("SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0")
        database.execute("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (database.schema,))
        database.make_schema()
        version = _version(database)
        refuse_unknown(version, len(MIGRATIONS), "the shared store", "database")
        for step in MIGRATIONS[version:]:
            database.run(step)
        database.set_meta("version", len(MIGRATIONS))


def _version(database: PostgresDatabase) -> int:
    return int(database.meta("version") or 0) if database.has_tables() else 0


SCHEMA = "everstream_"

_OTHERS = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s) AND nspname <> %s"


def schema_of(name: str, digest: str) -> str:
    """The schema of a version of a model; PostgreSQL takes no more than 63 characters."""
    if len(name) > 24:
        name = f"{name[:15]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"{SCHEMA}{name}_{digest[:16]}"


def owner_elsewhere(url: str, own: str, session: str) -> str | None:
    """Whose a session in another schema than ``own`` is. Raises `StoreError`."""
    try:
        with connect(url) as connection:
            for (schema,) in connection.execute(_OTHERS, (SCHEMA, own)).fetchall():
                table = sql.Identifier(schema, "session")
                find = sql.SQL("SELECT owner FROM {} WHERE id = %s").format(table)
                for (owner,) in connection.execute(find, (session,)):
                    return str(owner)
            return None
    except psycopg.Error as error:
        raise failure(error) from error
