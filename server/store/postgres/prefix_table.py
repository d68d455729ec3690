"""The rows of the prefix cache that replicas share, and the names of objects without a row.

An object without a row would never be deleted. So its name is in ``garbage`` before it is
put, and leaves that in the transaction that makes its row; one that loses its row
goes there with it. Times are the database's: replicas need not agree on theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psycopg
from psycopg import sql

from server.store.object_storage.objects import Connection

#: How the names of all objects begin that have their rows here, and of no others.
FOLDER = "prefixes/"

#: The second key of the lock that adding a row takes; the first is the schema's. The replicas'
#: own locks have numbers above zero.
_ROOM = -1

_BEGIN = "BEGIN; SET LOCAL search_path TO {}"
#: Most of this may be lost in a crash of the database.
_BEGIN_LAZY = _BEGIN + "; SET LOCAL synchronous_commit = off"

_COUNT = b"SELECT count(*) FROM prefix WHERE space = %s"
_LENGTHS = b"""
    SELECT DISTINCT num_tokens FROM prefix
    WHERE space = %s AND owner = %s AND num_tokens >= %s AND num_tokens < %s ORDER BY num_tokens
"""
_LONGEST = b"""
    SELECT key, num_tokens, name FROM prefix
    WHERE space = %s AND owner = %s AND key = ANY(%s) ORDER BY num_tokens DESC LIMIT 1
"""
_USE = b"""
    UPDATE prefix SET used_s = extract(epoch FROM clock_timestamp())
    WHERE space = %s AND owner = %s AND key = %s
        AND used_s <= extract(epoch FROM clock_timestamp()) - %s
"""
_REMOVE = b"""
    WITH gone AS (DELETE FROM prefix WHERE name = %s AND space = %s AND owner = %s AND key = %s
        RETURNING name)
    INSERT INTO garbage SELECT name, extract(epoch FROM clock_timestamp()) FROM gone
    ON CONFLICT DO NOTHING
"""
_IS_HERE = b"SELECT FROM prefix WHERE space = %s AND owner = %s AND key = %s"
_ANNOUNCE = b"INSERT INTO garbage VALUES (%s, extract(epoch FROM clock_timestamp()) + %s)"
_LOCK = b"SELECT pg_advisory_xact_lock(hashtext(current_schema()), %s)"
#: Where a sweep has been quicker there is no object any more, and so no row.
_ADD = b"""
    WITH announced AS (DELETE FROM garbage WHERE name = %s RETURNING name)
    INSERT INTO prefix (space, owner, key, num_tokens, bytes, name, used_s)
    SELECT %s, %s, %s, %s, %s, name, extract(epoch FROM clock_timestamp()) FROM announced
"""
#: As few as leave ``max_bytes``, of the last parameter's number of oldest ones.
_MAKE_ROOM = b"""
    WITH excess AS (SELECT sum(bytes) - %s AS bytes FROM prefix), oldest AS (
        SELECT place, sum(bytes) OVER (ORDER BY used_s, name) - bytes AS freed_before
        FROM (SELECT ctid AS place, bytes, used_s, name FROM prefix ORDER BY used_s, name LIMIT %s)
            AS first
    ), gone AS (
        DELETE FROM prefix WHERE ctid = ANY(ARRAY(
            SELECT place FROM oldest, excess WHERE oldest.freed_before < excess.bytes
        ))
        RETURNING name
    )
    INSERT INTO garbage SELECT name, extract(epoch FROM clock_timestamp()) FROM gone
    ON CONFLICT DO NOTHING
"""
_GIVE_UP = b"""
    INSERT INTO garbage VALUES (%s, extract(epoch FROM clock_timestamp()))
    ON CONFLICT (name) DO UPDATE SET due_s = excluded.due_s
"""
#: The locks keep rows from being made for what is being deleted. Other names in `garbage` may
#: well be in use: see `server.store.postgres.states`.
_TAKE_DUE = b"""
    SELECT name FROM garbage
    WHERE due_s <= extract(epoch FROM clock_timestamp()) AND starts_with(name, %s)
    ORDER BY due_s LIMIT %s FOR UPDATE SKIP LOCKED
"""
_SWEPT = b"DELETE FROM garbage WHERE name = ANY(%s)"


class PrefixRowKey(NamedTuple):
    """Where a row is: ``owner`` is a digest, ``key`` the one of the text, in hex digits."""

    space: str
    owner: str
    key: str


class Found(NamedTuple):
    """A row's state: the object ``name``, after ``num_tokens``."""

    place: PrefixRowKey
    num_tokens: int
    name: str


class PrefixTable:
    """``prefix`` and ``garbage`` in a schema, over a connection that commits by itself.

    All but the transactions themselves belong within one. Raises errors of psycopg's.
    """

    def __init__(self, connection: Connection, schema: str) -> None:
        self.connection = connection
        name = sql.Identifier(schema)
        self._begin = sql.SQL(_BEGIN).format(name)
        self._begin_lazy = sql.SQL(_BEGIN_LAZY).format(name)

    @contextmanager
    def transaction(self, *, synced: bool = False) -> Iterator[None]:
        """``synced``: what it does outlasts a crash of the database."""
        self.connection.execute(self._begin if synced else self._begin_lazy)
        try:
            yield
            self.connection.execute(b"COMMIT")
        except BaseException:
            with suppress(psycopg.Error):
                self.connection.execute(b"ROLLBACK")
            raise

    def count(self, space: str) -> int:
        """Rows of a space."""
        row = self.connection.execute(_COUNT, (space,)).fetchone()
        assert row is not None
        return int(row[0])

    def lengths(self, space: str, owner: str, min_tokens: int, end: int) -> list[int]:
        """Which there are from ``min_tokens`` on, and below ``end``, ascending."""
        rows = self.connection.execute(_LENGTHS, (space, owner, min_tokens, end))
        return [length for (length,) in rows]

    def longest(self, space: str, owner: str, keys: Sequence[str]) -> Found | None:
        """The one that has seen the most tokens."""
        row = self.connection.execute(_LONGEST, (space, owner, list(keys))).fetchone()
        return None if row is None else Found(PrefixRowKey(space, owner, row[0]), row[1], row[2])

    def use(self, place: PrefixRowKey, rarely_s: float) -> None:
        """Notes a use, unless one was noted in the last ``rarely_s``."""
        self.connection.execute(_USE, (*place, rarely_s))

    def remove(self, found: Found) -> None:
        """Its object is garbage at once."""
        self.connection.execute(_REMOVE, (found.name, *found.place))

    def is_here(self, place: PrefixRowKey) -> bool:
        """Whether there is a row."""
        return self.connection.execute(_IS_HERE, place).fetchone() is not None

    def announce(self, name: str, grace_s: float) -> None:
        """An object is about to be put, and becomes garbage if it has no row in time."""
        self.connection.execute(_ANNOUNCE, (name, grace_s))

    def add(self, found: Found, num_bytes: int, max_bytes: int) -> bool:
        """Makes the row of an object that was announced, and room for it.

        False where its time had run out. Raises `psycopg.errors.UniqueViolation` where
        there is a row.
        """
        self.connection.execute(_LOCK, (_ROOM,))  # so that two together make room for both
        row = (found.name, *found.place, found.num_tokens, num_bytes)
        is_made = self.connection.execute(_ADD, row).rowcount > 0
        num_oldest = 64
        while self.connection.execute(_MAKE_ROOM, (max_bytes, num_oldest)).rowcount == num_oldest:
            pass
        return is_made

    def give_up(self, name: str) -> None:
        """An object that has no row is not to have one."""
        self.connection.execute(_GIVE_UP, (name,))

    def take_due(self, limit: int) -> list[str]:
        """Garbage, which no other replica gets before the transaction ends."""
        return [name for (name,) in self.connection.execute(_TAKE_DUE, (FOLDER, limit))]

    def forget(self, names: Sequence[str]) -> None:
        """Their objects are deleted."""
        self.connection.execute(_SWEPT, (list(names),))
