"""The SQLite database of a store: its tables, how it is opened, and what its failures mean.

In WAL mode. A transaction that must outlast a power cut is synced; one that can
be done over from the journal is not, and becomes durable with the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw

from server.store.codec import UNSTORABLE
from server.store.database import SECOND, TABLES, refuse_unknown
from server.store.errors import Fenced, RecordRefused, StoreError, StoreFailed, StoreFull
from server.store.files import NO_ROOM, make_private
from server.store.sqlite.reserve import FULL

_TYPES = {
    "integer": "INTEGER",
    "text": "TEXT",
    "real": "REAL",
    "blob": "BLOB",
    "row_key": "INTEGER PRIMARY KEY",
    "session_key": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "end": " STRICT",
    "end_by_key": " STRICT, WITHOUT ROWID",
}

#: ``MIGRATIONS[i]`` leads from format i to format i + 1. Those of a release never change.
MIGRATIONS: tuple[str, ...] = (
    f"""
    CREATE TABLE meta (name TEXT PRIMARY KEY, value ANY) STRICT, WITHOUT ROWID;

    -- One row for each commit: what has not reached the other tables yet, and the keys of its
    -- sessions.
    CREATE TABLE journal (id INTEGER PRIMARY KEY, data BLOB NOT NULL, keys TEXT NOT NULL) STRICT;
    {TABLES.format(**_TYPES)}
    """,
    SECOND,
)


def migrate(connection: apsw.Connection) -> None:
    """Brings the tables to this version, each step whole or not at all. Raises `StoreTooNew`."""
    version = format_of(connection)
    for number, step in enumerate(MIGRATIONS[version:], version + 1):
        with connection:
            connection.execute(step)
            connection.pragma("user_version", number)


def format_of(connection: apsw.Connection) -> int:
    """The format of the tables; 0 where there are none. Raises `StoreTooNew`."""
    version = int(connection.pragma("user_version"))
    refuse_unknown(version, len(MIGRATIONS), "the store", "directory")
    return version


FILE_NAME = "sessions.sqlite3"


class SqliteDatabase:
    """One connection, with the fence that its owner holds; in memory where there is no ``path``."""

    def __init__(self, path: Path | None, vfs: str | None, is_full: bool) -> None:
        self.num_wal_pages = 0
        self.fence = 0
        name = ":memory:" if path is None else str(_private(path))
        self._connection = connection = apsw.Connection(name, vfs=vfs)
        self.execute = connection.execute
        self._sync = "FULL" if is_full else "NORMAL"
        try:
            connection.set_busy_timeout(5000)  # first: whatever follows may wait for a lock
            connection.pragma("auto_vacuum", "INCREMENTAL")
            connection.pragma("temp_store", "MEMORY")
            if path is not None:
                self._write_ahead()
            migrate(connection)
        except BaseException:
            self.abandon()
            raise

    def _write_ahead(self) -> None:
        connection = self._connection
        if connection.pragma("journal_mode", "WAL") != "wal":
            raise StoreFailed("the file system of the session store has no shared memory")
        connection.pragma("synchronous", self._sync)
        connection.pragma("journal_size_limit", 64 << 20)
        connection.set_wal_hook(self._note_wal)

    @contextmanager
    def transaction(self, synced: bool = True) -> Iterator[None]:
        """All of it or nothing. Raises `Fenced` where another process has raised the fence."""
        is_lazy = self._sync == "FULL" and not synced
        if is_lazy:
            self.execute("PRAGMA synchronous = NORMAL")
        try:
            self.execute("BEGIN IMMEDIATE")
            self.check_fence()
            yield
            self.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self.execute("ROLLBACK")
            raise
        finally:
            if is_lazy:
                self.execute("PRAGMA synchronous = FULL")

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A part of a transaction of the caller's: all of it or nothing."""
        self.execute("SAVEPOINT part")
        try:
            yield
        except BaseException:
            if self._connection.in_transaction:
                self.execute("ROLLBACK TO part")
                self.execute("RELEASE part")
            raise
        self.execute("RELEASE part")

    def check_fence(self) -> None:
        """Raises `Fenced`."""
        if self.fence and self.meta("fence") != self.fence:
            raise Fenced("another process has taken this store over")

    def meta(self, name: str) -> Any:
        """A value that the store remembers, or None."""
        for (value,) in self.execute("SELECT value FROM meta WHERE name = ?", (name,)):
            return value
        return None

    def set_meta(self, name: str, value: object) -> None:
        """Has the store remember ``value``."""
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def checkpoint(self, truncate: bool = False) -> None:
        """Brings the write-ahead log into the database file."""
        mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if truncate else apsw.SQLITE_CHECKPOINT_PASSIVE
        with suppress(apsw.BusyError):  # a reader still needs the log: it stays a while
            self._connection.wal_checkpoint(mode=mode)
        self.num_wal_pages = 0

    def vacuum(self, num_pages: int) -> None:
        """Gives free pages back to the file system."""
        self.execute(f"PRAGMA incremental_vacuum({num_pages:d})").fetchall()

    def pragma(self, name: str) -> Any:
        """The value of a setting or counter of SQLite's."""
        return self._connection.pragma(name)

    def close(self) -> None:
        """After the last transaction; SQLite brings its log into the database."""
        self._connection.close()

    def abandon(self) -> None:
        """After a failure: nothing is tried again with what this connection knows."""
        with suppress(apsw.Error):  # it may be closed already
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self._connection.close(True)

    def _note_wal(self, _: apsw.Connection, __: str, num_pages: int) -> int:
        self.num_wal_pages = num_pages
        return apsw.SQLITE_OK


def _private(path: Path) -> Path:
    """The file of the database in ``path``; SQLite gives its other files the rights of that."""
    for file in (path / FILE_NAME, *path.glob(f"{FILE_NAME}-*")):
        make_private(file)
    return path / FILE_NAME


#: What the statements were about is at fault, and not the database: others are done.
REFUSALS = (*UNSTORABLE, apsw.ConstraintError, apsw.MismatchError, apsw.TooBigError)
#: All that can go wrong on a connection.
ERRORS = (apsw.Error, OSError, *REFUSALS)


def failure(error: Exception) -> StoreError:
    """What an error of SQLite or of the file system means."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, REFUSALS):
        return RecordRefused(error)
    if isinstance(error, apsw.FullError) or getattr(error, "errno", None) in NO_ROOM:
        return StoreFull(FULL)
    if isinstance(error, apsw.BusyError):
        return StoreFailed("the session store failed: another process has locked its database")
    return StoreFailed("the session store failed", detail=str(error))


@contextmanager
def errors_of_sqlite() -> Iterator[None]:
    """Errors of SQLite as those of a store."""
    try:
        yield
    except apsw.Error as error:
        raise failure(error) from error
