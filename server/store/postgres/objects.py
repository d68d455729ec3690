"""States by name in a place that all replicas reach: a table, or an object storage."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import psycopg
from psycopg.rows import TupleRow

from server.engine.session import StateBlock
from server.store.base import Chunk, Identity, SnapshotBroken, StoreFailed
from server.store.postgres.database import PostgresDatabase
from server.store.snapshots import decode_state, encode_state

# They are too large for the rows that point to them, and they never change once
# they are there, so that any store of named bytes will do.


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


# -------------------------------------------------------------------------------------------------
# The states of a shared store: objects by name, and how none is leaked.
#
# A name is noted as garbage before its object is put, and again by a trigger when a row
# that names it goes. (Those of prefixes are for `server.store.postgres.prefixes` to
# look after.) When that is due, whatever no row names is deleted; so a crash at
# any point leaves nothing behind, and no replica takes away what another has just put.
#
# A state in the table is due at once when its last row has gone, and one that a row is being made
# for is kept by another trigger. One in an object storage, which knows of no transactions, is due
# after `DUE_S`.


logger = logging.getLogger(__name__)

#: What the names of states begin with that are in the table of the database.
IN_TABLE = "table-"
REST_S = 10.0
#: Much longer than from a put to its row.
DUE_S = 3600
AT_ONCE = 32

_NOTE = (
    "INSERT INTO garbage SELECT unnest(?::text[]), extract(epoch FROM now()) + ? "
    "ON CONFLICT (name) DO UPDATE SET due_s = excluded.due_s"
)
_TAKE = """
    DELETE FROM garbage WHERE name IN (
        SELECT name FROM garbage
        WHERE due_s < extract(epoch FROM now()) AND NOT starts_with(name, 'prefixes/')
        LIMIT ? FOR UPDATE SKIP LOCKED
    ) RETURNING name, EXISTS (SELECT FROM snapshot WHERE file = garbage.name)
"""


class SharedStates:
    """See `server.store.snapshots.States`.

    What ``objects`` do not take goes to a table of the database, and for `REST_S` so does
    what comes after it: a session that is new must have its state somewhere.
    """

    def __init__(self, database: PostgresDatabase, objects: Objects, identity: Identity) -> None:
        self._database, self._objects, self._identity = database, objects, identity
        self._table = TableObjects(database.connection)
        self._rests_until_s = 0.0

    def write(self, states: Sequence[tuple[StateBlock, int]]) -> list[str]:
        if not states:
            return []
        parts = [encode_state(state, self._identity, position) for state, position in states]
        is_table = isinstance(self._objects, TableObjects)
        if not is_table and time.monotonic() >= self._rests_until_s:
            try:
                return self._put(parts, self._objects)
            except StoreFailed as error:
                logger.warning(
                    "object storage failed, writing states to the database: %s",
                    error.detail or error.message,
                )
                self._rests_until_s = time.monotonic() + REST_S
        return self._put(parts, self._table)

    def _put(self, parts: list[list[Chunk]], objects: Objects) -> list[str]:
        is_table = isinstance(objects, TableObjects)
        names = [(IN_TABLE if is_table else "") + secrets.token_hex(16) for _ in parts]
        named = [*zip(names, parts, strict=True)]
        # In a table they are synced with the row that names them, which comes later.
        with self._database.transaction(synced=not is_table):
            self._database.execute(_NOTE, (names, DUE_S))
            if is_table:
                objects.put_all(named)
        if not is_table:
            objects.put_all(named)
        return names

    def read(self, name: str, position: int) -> StateBlock:
        return decode_state(self._place(name).get(name), self._identity, position)

    def remove(self, names: Iterable[str]) -> None:
        """The trigger has noted them: another replica may be about to use one."""

    def sweep(self) -> int:
        """Deletes what is due and of no use; returns how many names it has looked at."""
        with self._database.transaction(synced=False):
            found = self._database.execute(_TAKE, (AT_ONCE,)).fetchall()
            unused = [name for name, is_used in found if not is_used]
            for objects in {self._place(name) for name in unused}:
                objects.delete([name for name in unused if self._place(name) is objects])
        return len(found)

    def close(self) -> None:
        self._objects.close()

    def _place(self, name: str) -> Objects:
        return self._table if name.startswith(IN_TABLE) else self._objects
