"""What both databases have: the way to ask them, the tables, and the formats that are known.

Each database adds what it alone has: `server.store.sqlite.database` and
`server.store.postgres.migrations`. Checksums are described in `server.store.codec`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from server.store.errors import StoreTooNew


class Database(Protocol):
    """A connection. Statements have a question mark for each parameter."""

    @property
    def execute(self) -> Callable[..., Any]: ...
    def transaction(self, synced: bool = True) -> AbstractContextManager[None]: ...
    def savepoint(self) -> AbstractContextManager[None]: ...
    def set_meta(self, name: str, value: object) -> None: ...


#: For `str.format`, with the names of types; ``end`` and ``end_by_key`` follow lists of columns.
TABLES = """
    CREATE TABLE identity (key {row_key}, fields {text} NOT NULL UNIQUE){end};

    -- As it was after the commit of number `journal`. Times are seconds of the store's clock.
    -- `broken` is why a session is in quarantine.
    CREATE TABLE session (
        key {session_key},
        id {text} NOT NULL UNIQUE,
        owner {text} NOT NULL,
        epoch {integer} NOT NULL,
        length {integer} NOT NULL,
        seq {integer} NOT NULL,
        running {text},
        num_entries {integer} NOT NULL,
        log_seq {integer} NOT NULL,
        log_tokens {integer} NOT NULL DEFAULT 0,
        bytes {integer} NOT NULL DEFAULT 0,
        journal {integer} NOT NULL,
        created_s {real} NOT NULL,
        used_s {real} NOT NULL,
        broken {text},
        sum {integer} NOT NULL
    ){end};
    CREATE INDEX session_owner ON session (owner, id);
    CREATE INDEX session_used ON session (used_s);
    CREATE INDEX session_running ON session (id) WHERE running IS NOT NULL;

    -- Entries `first` <= number < `end` of a session's log; `running` is the request before them.
    CREATE TABLE segment (
        session {integer} NOT NULL,
        first {integer} NOT NULL,
        "end" {integer} NOT NULL,
        last_seq {integer} NOT NULL,
        num_tokens {integer} NOT NULL,
        running {text},
        data {blob} NOT NULL,
        sum {integer} NOT NULL,
        PRIMARY KEY (session, first)
    ){end};

    -- A value, before the entry of number `place`. The state is in `file`, if there is one.
    CREATE TABLE snapshot (
        key {row_key},
        session {integer} NOT NULL,
        place {integer} NOT NULL,
        length {integer} NOT NULL,
        identity {integer} NOT NULL,
        value {text} NOT NULL,
        file {text},
        bytes {integer} NOT NULL,
        sum {integer} NOT NULL
    ){end};
    CREATE INDEX snapshot_session ON snapshot (session);
    CREATE INDEX snapshot_file ON snapshot (file) WHERE file IS NOT NULL;

    -- `gone_s` is when the session was deleted. `note` came with the request, and is kept for as
    -- long as its session.
    CREATE TABLE request_key (
        owner {text} NOT NULL,
        key {text} NOT NULL,
        session {integer} NOT NULL,
        session_id {text} NOT NULL,
        request_id {text} NOT NULL,
        first_seq {integer} NOT NULL,
        length {integer} NOT NULL,
        is_append {integer} NOT NULL,
        finished {text},
        gone_s {real},
        note {text},
        sum {integer} NOT NULL,
        note_sum {integer},
        PRIMARY KEY (owner, key)
    ){end_by_key};
    CREATE INDEX request_key_session ON request_key (session);
    CREATE INDEX request_key_gone ON request_key (gone_s) WHERE gone_s IS NOT NULL;
"""

#: From format 1 to format 2: a snapshot within a prompt leads to shorter texts than its own. Rows
#: of format 1 have the length of their texts there, and so are found for no shorter one.
SECOND = "ALTER TABLE snapshot RENAME COLUMN length TO min_length"


def refuse_unknown(version: int, newest: int, store: str, place: str) -> None:
    """Raises `StoreTooNew` unless a ``store`` has a format from 0, no tables, to ``newest``.

    ``place`` is what the operator can name instead.
    """
    if not 0 <= version <= newest:
        raise StoreTooNew(
            f"{store} has format {version}, and this version of everstream knows "
            f"{newest}: use a newer one, or another {place}"
        )
