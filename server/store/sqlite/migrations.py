"""The tables of a store, and how a store of an older version gets them."""

from __future__ import annotations

import apsw

from server.store.errors import StoreFailed, StoreTooNew
from server.store.stamping import add_sums

#: ``MIGRATIONS[i]`` leads from version i to version i + 1. Those of a release never change.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE meta (name TEXT PRIMARY KEY, value ANY) STRICT, WITHOUT ROWID;

    -- One row for each commit: what has not reached the other tables yet.
    CREATE TABLE journal (id INTEGER PRIMARY KEY, data BLOB NOT NULL) STRICT;

    CREATE TABLE identity (key INTEGER PRIMARY KEY, fields TEXT NOT NULL UNIQUE) STRICT;

    -- As it was after the commit of number `journal`. Times are seconds of the store's clock.
    CREATE TABLE session (
        key INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        owner TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        length INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        running TEXT,
        num_entries INTEGER NOT NULL,
        log_seq INTEGER NOT NULL,
        log_tokens INTEGER NOT NULL DEFAULT 0,
        bytes INTEGER NOT NULL DEFAULT 0,
        journal INTEGER NOT NULL,
        created_s REAL NOT NULL,
        used_s REAL NOT NULL
    ) STRICT;
    CREATE INDEX session_owner ON session (owner, id);
    CREATE INDEX session_used ON session (used_s);
    CREATE INDEX session_running ON session (id) WHERE running IS NOT NULL;

    -- Entries `first` <= number < `end` of a session's log; `running` is the request before them.
    CREATE TABLE segment (
        session INTEGER NOT NULL,
        first INTEGER NOT NULL,
        "end" INTEGER NOT NULL,
        last_seq INTEGER NOT NULL,
        num_tokens INTEGER NOT NULL,
        running TEXT,
        data BLOB NOT NULL,
        PRIMARY KEY (session, first)
    ) STRICT;

    -- A value, before the entry of number `place`. The state is in `file`, if there is one.
    CREATE TABLE snapshot (
        key INTEGER PRIMARY KEY,
        session INTEGER NOT NULL,
        place INTEGER NOT NULL,
        length INTEGER NOT NULL,
        identity INTEGER NOT NULL,
        value TEXT NOT NULL,
        file TEXT,
        bytes INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX snapshot_session ON snapshot (session);
    CREATE INDEX snapshot_file ON snapshot (file) WHERE file IS NOT NULL;

    -- `gone_s` is when the session was deleted.
    CREATE TABLE request_key (
        owner TEXT NOT NULL,
        key TEXT NOT NULL,
        session INTEGER NOT NULL,
        session_id TEXT NOT NULL,
        request_id TEXT NOT NULL,
        first_seq INTEGER NOT NULL,
        length INTEGER NOT NULL,
        is_append INTEGER NOT NULL,
        finished TEXT,
        gone_s REAL,
        PRIMARY KEY (owner, key)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX request_key_session ON request_key (session);
    CREATE INDEX request_key_gone ON request_key (gone_s) WHERE gone_s IS NOT NULL;
    """,
    """
    -- What came with the request to be kept beside its key, for as long as its session.
    ALTER TABLE request_key ADD COLUMN note TEXT;
    """,
    """
    -- Why nobody may go on with a session: part of its log is unusable.
    ALTER TABLE session ADD COLUMN broken TEXT;
    """,
    """
    -- Checksums, see `server.store.sums`; NULL in rows of before. `keys` are those of the lines.
    ALTER TABLE journal ADD COLUMN keys TEXT;
    ALTER TABLE session ADD COLUMN sum INTEGER;
    ALTER TABLE segment ADD COLUMN sum INTEGER;
    ALTER TABLE snapshot ADD COLUMN sum INTEGER;
    ALTER TABLE request_key ADD COLUMN sum INTEGER;
    ALTER TABLE request_key ADD COLUMN note_sum INTEGER;
    """,
)


#: The format from which on rows have checksums.
WITH_SUMS = 4
#: A column that each format has brought.
_SIGNS = (("meta", "name"), ("request_key", "note"), ("session", "broken"), ("session", "sum"))


def format_of(connection: apsw.Connection) -> int:
    """The format of the tables.

    Raises `StoreTooNew` where a newer version of everstream has written them, and `StoreFailed`
    where the number in the file is not that of its tables.
    """
    version = int(connection.pragma("user_version"))
    if version > len(MIGRATIONS):
        raise StoreTooNew(
            f"the store has format {version}, and this version of everstream knows "
            f"{len(MIGRATIONS)}: use a newer one, or another directory"
        )
    has = [name in _columns(connection, table) for table, name in _SIGNS]
    tables = has.index(False) if False in has else len(has)
    if version != tables:
        raise StoreFailed(
            f"the database says format {version} (PRAGMA user_version), and its tables are of "
            f"format {tables}: the number was edited. Set it back: PRAGMA user_version = {tables}"
        )
    return version


def _columns(connection: apsw.Connection, table: str) -> set[str]:
    return {str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")}


def migrate(connection: apsw.Connection) -> None:
    """Brings the tables to this version, each step whole or not at all. Raises as `format_of`."""
    for step in range(format_of(connection), len(MIGRATIONS)):
        with connection:
            connection.execute(MIGRATIONS[step])
            if step + 1 == WITH_SUMS:
                add_sums(connection.execute)
            connection.pragma("user_version", step + 1)
