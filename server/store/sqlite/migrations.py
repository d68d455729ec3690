"""The tables of an embedded store, and how a store of an older format gets them."""

from __future__ import annotations

import apsw

from server.store.schema import TABLES, refuse_unknown

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
