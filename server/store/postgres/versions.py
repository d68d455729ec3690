"""Each version of a model has a schema of its own in the database of a shared store."""

from __future__ import annotations

import hashlib

import psycopg
from psycopg import sql

from server.store.postgres.connecting import connect
from server.store.postgres.database import failure

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
