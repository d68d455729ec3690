"""States by name in a place that all replicas reach: a table, or an object storage.

They are too large for the rows that point to them, and they never change once
they are there, so that any store of named bytes will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import psycopg
from psycopg.rows import TupleRow

from server.store.errors import SnapshotBroken, StoreFailed
from server.store.files import Chunk

Connection = psycopg.Connection[TupleRow]


class Objects(Protocol):
    """States by name. Every call blocks, and all come from one thread.

    Each raises `StoreFailed` where the place does not answer.
    """

    def put(self, name: str, parts: Sequence[Chunk]) -> None:
        """A new object of ``parts``, durable when this returns."""

    def put_all(self, objects: Sequence[tuple[str, Sequence[Chunk]]]) -> None:
        """`put` for each, all at once where that is quicker."""

    def get(self, name: str) -> bytes:
        """The whole object. Raises `SnapshotBroken` where it is not there."""

    def delete(self, names: Sequence[str]) -> None:
        """Removes those that are there."""

    def close(self) -> None:
        """Releases what the calls need."""


class TableObjects:
    """The table ``object``, over the caller's connection and within its transaction.

    What is put is durable when that transaction is.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, name: str, parts: Sequence[Chunk]) -> None:
        self._execute(
            "INSERT INTO object (name, data) VALUES (%s, %b)"
            " ON CONFLICT (name) DO UPDATE SET data = excluded.data",
            (name, b"".join(parts)),
        )

    def put_all(self, objects: Sequence[tuple[str, Sequence[Chunk]]]) -> None:
        for name, parts in objects:
            self.put(name, parts)

    def get(self, name: str) -> bytes:
        cursor = self._execute("SELECT data FROM object WHERE name = %s", (name,))
        row = cursor.fetchone()
        if row is None:
            raise SnapshotBroken("its object is not there", detail=name)
        return bytes(row[0])

    def delete(self, names: Sequence[str]) -> None:
        self._execute("DELETE FROM object WHERE name = ANY(%s)", (list(names),))

    def close(self) -> None:
        """The connection is the caller's."""

    def _execute(self, query: str, values: tuple[object, ...]) -> psycopg.Cursor[TupleRow]:
        try:
            return self._connection.execute(query.encode(), values, binary=True)
        except psycopg.Error as error:
            raise StoreFailed(
                "the table of states does not answer", detail=str(error).strip()
            ) from error
