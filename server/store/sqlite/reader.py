"""Questions to the store in a folder that another process may have open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from server.store.base import Identity
from server.store.codec import decode_json
from server.store.sqlite.database import FILE_NAME, errors_of_sqlite


@contextmanager
def open_for_reading(path: Path) -> Iterator[apsw.Connection]:
    """The database of the store at ``path``. Raises `StoreError`, here and within."""
    with errors_of_sqlite():
        connection = apsw.Connection(str(path / FILE_NAME), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            connection.set_busy_timeout(5000)
            yield connection
        finally:
            connection.close(True)


def identity_of(fields: str) -> Identity:
    """The identity in a row of the database."""
    return Identity.of(decode_json(fields))


def newest_identity(path: Path) -> Identity | None:
    """What the newest states of a store belong to; None where it has none. Raises `StoreError`."""
    for (fields,) in _rows(path, "SELECT fields FROM identity ORDER BY key DESC LIMIT 1"):
        return identity_of(str(fields))
    return None


def owner_of(path: Path, session: str) -> str | None:
    """Whose a session is. Raises `StoreError`."""
    for (owner,) in _rows(path, "SELECT owner FROM session WHERE id = ?", session):
        return str(owner)
    return None


def owner_and_identity(path: Path, session: str) -> tuple[str, Identity] | None:
    """Whose a session is, and what its newest snapshot belongs to. Raises `StoreError`."""
    query = (
        "SELECT owner, fields FROM session JOIN snapshot ON snapshot.session = session.key "
        "JOIN identity ON identity.key = snapshot.identity WHERE session.id = ? "
        "ORDER BY snapshot.key DESC LIMIT 1"
    )
    for owner, fields in _rows(path, query, session):
        return str(owner), identity_of(str(fields))
    return None


def num_sessions(path: Path) -> int:
    """How many sessions a store has. Raises `StoreError`."""
    ((count,),) = _rows(path, "SELECT count(*) FROM session")
    return int(str(count))


def _rows(path: Path, query: str, *values: str) -> list[tuple[object, ...]]:
    with open_for_reading(path) as connection:
        return list(connection.execute(query, values))
