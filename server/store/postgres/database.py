"""One connection to PostgreSQL: transactions that are fenced, and statements in pipelines.

The SQL of `server.store` is written for both databases, with a question mark for each
parameter. Every transaction names its schema, so that a pooler may stand in between.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, Self

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from server.store.codec import UNSTORABLE
from server.store.errors import Fenced, RecordRefused, StoreError, StoreFailed, StoreFull
from server.store.postgres.connecting import connect

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

    def __init__(self, url: str, schema: str, is_full: bool, is_pooled: bool = False) -> None:
        self.schema = schema
        self.me = self.link = 0
        self.is_full = is_full
        self._is_pooled = is_pooled
        self._is_within = self._is_pending = False
        self._pipeline: psycopg.Pipeline | None = None
        self._connection = connect(url, prepare=not is_pooled)
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
