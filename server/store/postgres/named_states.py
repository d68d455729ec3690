"""The table of named states, which all replicas share."""

from __future__ import annotations

from collections.abc import Sequence

from server.store.files import Chunk
from server.store.postgres.database import PostgresDatabase


def digests(database: PostgresDatabase) -> dict[str, str]:
    """The digest of each state by its name."""
    return dict(database.execute("SELECT name, digest FROM named_state").fetchall())


def read(database: PostgresDatabase, name: str) -> bytes | None:
    """The state's bytes; None where there is none."""
    query = "SELECT data FROM named_state WHERE name = ?"
    rows = database.execute(query, (name,)).fetchall()
    return bytes(rows[0][0]) if rows else None


def put(database: PostgresDatabase, name: str, digest: str, parts: Sequence[Chunk]) -> None:
    """Adds the state, or replaces it."""
    query = (
        "INSERT INTO named_state VALUES (?, ?, ?) ON CONFLICT (name) "
        "DO UPDATE SET digest = excluded.digest, data = excluded.data"
    )
    database.execute(query, (name, digest, b"".join(parts)))


def drop(database: PostgresDatabase, name: str) -> bool:
    """Whether there was one."""
    query = "DELETE FROM named_state WHERE name = ? RETURNING name"
    return bool(database.execute(query, (name,)).fetchall())
