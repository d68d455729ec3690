"""Stores of either database that a test opens as often as it wants, and changes by SQL."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import psycopg

from server.store.codec import decode_value, row_sum
from server.store.postgres.store import PostgresStore
from server.store.sqlite.database import DATABASE_FILE
from server.store.sqlite.store import open_store
from tests.server.cluster.stores import shared_place
from tests.server.store.records import IDENTITY


@dataclass(frozen=True)
class Place:
    """A store in the folder ``where``, or in the PostgreSQL at the URL ``where``."""

    where: Path | str

    @property
    def is_shared(self) -> bool:
        return isinstance(self.where, str)

    def open(self) -> Any:
        if isinstance(self.where, str):
            return PostgresStore(shared_place(self.where))
        return open_store(self.where, IDENTITY)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Runs SQL as an administrator can; its rows. Raises errors of the database."""
        if isinstance(self.where, str):
            with psycopg.connect(self.where, autocommit=True) as connection:
                connection.execute("SET search_path TO everstream_test")
                cursor = connection.execute(statement.encode())
                return cursor.fetchall() if cursor.description else []
        with closing(apsw.Connection(str(self.where / DATABASE_FILE))) as database:
            database.set_busy_timeout(60_000)
            return list(database.execute(statement))


def to_format_1(place: Place) -> None:
    """Makes of a closed store what an older version would have written."""
    query = (
        "SELECT snapshot.key, session, place, value, file, fields FROM snapshot "
        "JOIN identity ON identity.key = snapshot.identity"
    )
    for key, session, number, value, file, fields in place.execute(query):
        length = decode_value(value).length
        total = row_sum(session, number, length, value, file, fields)
        place.execute(f"UPDATE snapshot SET min_length = {length}, sum = {total} WHERE key = {key}")
    place.execute("ALTER TABLE snapshot RENAME COLUMN min_length TO length")
    if place.is_shared:
        place.execute("UPDATE meta SET value = '1' WHERE name = 'version'")
    else:
        place.execute("PRAGMA user_version = 1")
