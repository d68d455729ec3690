"""One connection to PostgreSQL: transactions that are fenced, and waits that end.

The SQL of `server.store` is written for both databases, with a question mark for each
parameter. Every transaction names its schema, so that a pooler may stand in between.
"""

from __future__ import annotations

import errno
import select
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.waiting import Ready, Wait

from server.store.codec import UNSTORABLE
from server.store.errors import Fenced, RecordRefused, StoreError, StoreFailed, StoreFull

#: Nothing that a store asks takes so long, unless the database hangs.
TIMEOUT_S = 2.5
#: So that nobody waits for long for a replica that was stopped or cut off in a transaction.
_LIMITS = (
    "SET LOCAL idle_in_transaction_session_timeout = 3000; SET LOCAL lock_timeout = 2000; "
    "SET LOCAL statement_timeout = 5000"
)
_IN_TRANSACTION = (TransactionStatus.INTRANS, TransactionStatus.INERROR)
FENCED = "another replica has taken over what this one had"


class Hung(psycopg.OperationalError):
    """No answer came in time."""


class _Timed(psycopg.Connection[tuple[Any, ...]]):
    """A connection that waits for `TIMEOUT_S` at most, whatever the database does."""

    def wait(
        self, gen: Generator[Any, Any, Any], interval: float = 0.0, timeout: float | None = None
    ) -> Any:
        """Runs ``gen`` to its end. Raises `psycopg.OperationalError` after the time."""
        until_s = time.monotonic() + (TIMEOUT_S if timeout is None else timeout)
        poll, fd = select.poll(), self.pgconn.socket
        try:
            wanted = next(gen)
            while True:
                poll.register(fd, _events(wanted))
                found = poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
                if not found:
                    self.pgconn.finish()  # whatever it still answers is of no use
                    raise Hung("the database does not answer")
                wanted = gen.send(_ready(found[0][1]))
        except StopIteration as end:
            return end.value


def _events(wanted: Wait) -> int:
    reads = select.POLLIN if wanted & Wait.R else 0
    return reads | (select.POLLOUT if wanted & Wait.W else 0)


def _ready(events: int) -> Ready:
    """An error is for the next read to find."""
    reads = Ready.R if events & ~select.POLLOUT else Ready.NONE
    return Ready(reads | (Ready.W if events & select.POLLOUT else Ready.NONE))


class Database:
    """A connection for one thread, to the schema called ``schema``.

    ``is_full``: a commit outlasts a crash of the database. Raises errors of psycopg's
    where it cannot be had. ``me`` and ``link`` are the replica that it writes for, once
    that is known.
    """

    def __init__(self, url: str, schema: str, is_full: bool, is_pooled: bool = False) -> None:
        self.schema = schema
        self.me = self.link = 0
        self.is_full = is_full
        self._is_pooled = is_pooled
        self._connection = connect(url, prepare=not is_pooled)
        path = sql.SQL("SET LOCAL search_path TO {}").format(sql.Identifier(schema))
        self._begin = (
            f"BEGIN ISOLATION LEVEL READ COMMITTED; {path.as_string(self._connection)}; {_LIMITS}"
        )
        self._cursor = self._connection.cursor()

    # Asking

    def execute(self, query: str, parameters: Sequence[object] = ()) -> psycopg.Cursor[Any]:
        """A statement in the transaction, or one of its own; the rows are read already."""
        if self._connection.pgconn.transaction_status == TransactionStatus.IDLE:
            with self.whole():
                return self.execute(query, parameters)
        cursor = self._connection.cursor()
        cursor.execute(translated(query), parameters)
        return cursor

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
        """Statements without parameters and results."""
        self._connection.execute(statements)

    # Transactions

    @contextmanager
    def transaction(self, synced: bool = True) -> Iterator[None]:
        """All of it or nothing, and only for a replica that is still one.

        Raises `Fenced`. What is not ``synced`` may be lost with what comes after it. Of that
        a connection tells, which ends with the database; a pooler's does not.
        """
        synced = synced or self._is_pooled
        asked = f"SELECT hold({self.me:d}, {self.link:d})"
        lazy = "" if synced and self.is_full else "; SET LOCAL synchronous_commit = off"
        with self._within(f"{self._begin}{lazy}; {asked}") as cursor:
            while cursor.nextset():
                pass
            if not cursor.fetchone()[0]:
                raise Fenced(FENCED)
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A transaction for no replica."""
        with self._within(self._begin):
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """All that is read is of one moment."""
        level = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"
        with self._within(f"{self._begin}; {level}"):
            yield

    @contextmanager
    def _within(self, begin: str) -> Iterator[Any]:
        cursor = self._connection.cursor()
        try:
            cursor.execute(begin.encode())
            yield cursor
            cursor.execute(b"COMMIT")
        except BaseException:
            if not self._connection.broken:
                with suppress(psycopg.Error):
                    self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A part of a transaction of the caller's: all of it or nothing."""
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

    def close(self) -> None:
        self._connection.close()


def connect(url: str, *, prepare: bool = True, timed: bool = True) -> psycopg.Connection[Any]:
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
        connect_timeout=2,
        keepalives_idle=5,
        keepalives_interval=2,
        keepalives_count=3,
        tcp_user_timeout=10_000,
        application_name="everstream",
    )


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
