"""States in a place that all replicas reach: a table, or an object storage.

They are objects with a name. A session's is named by its snapshot. A prompt's is in the prefix
cache that all replicas share: what one has put, another finds.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, Protocol, TypeVar

import orjson
import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from server.engine.prefixes import Evicted, Prefix, keys
from server.engine.session import StateBlock
from server.store.base import (
    Chunk,
    Identity,
    SnapshotBroken,
    SnapshotMismatch,
    StoreError,
    StoreFailed,
)
from server.store.postgres.database import PostgresDatabase
from server.store.states import decode_prefix, decode_state, encode_prefix, encode_state

# -------------------------------------------------------------------------------------------------
# States by name, in a table or an object storage, and those of a replica's sessions.

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
# that names it goes. (Those of prefixes are for `server.store.postgres.objects` to
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
    """See `server.store.states.States`.

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


# -------------------------------------------------------------------------------------------------
# The rows of the prefix cache that replicas share, and the names of objects without a row.
#
# An object without a row would never be deleted. So its name is in ``garbage`` before it is
# put, and leaves that in the transaction that makes its row; one that loses its row
# goes there with it. Times are the database's: replicas need not agree on theirs.


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
#: well be in use: see `server.store.postgres.objects`.
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


# -------------------------------------------------------------------------------------------------
# A table says which states there are, and whose; the states themselves are `Objects`.
# Nothing here is needed: what is lost is computed again, and a store that does not answer
# has nothing until it has rested.


#: Objects that one sweep deletes: S3 takes a thousand at once.
MAX_SWEPT = 100

R = TypeVar("R")


@dataclass(frozen=True)
class SharedLimits:
    """``max_bytes`` of states over all replicas; those unused for longest go first.

    What saves fewer than ``min_tokens`` is read again sooner than it is fetched. A use
    is noted once in ``rarely_s``. A store that fails is left alone for ``rest_s``, and
    an object that has no row after ``grace_s`` is deleted. What memory was given is
    asked for again after ``kept_s``, though it may still have it.
    """

    max_bytes: int
    min_tokens: int = 128
    rarely_s: float = 60.0
    rest_s: float = 5.0
    grace_s: float = 600.0
    kept_s: float = 600.0


class _PrefixConnection(NamedTuple):
    """What a connection gives access to, as long as it lives."""

    table: PrefixTable
    objects: Objects


class SharedPrefixes:
    """As `server.store.sqlite.files.PrefixFiles`, for all replicas of a model.

    For one thread at a time. ``connect`` makes a connection that commits by itself and
    whose waits end; ``objects`` what has the states, perhaps over that connection.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        schema: str,
        objects: Callable[[Connection], Objects],
        identity: Identity,
        limits: SharedLimits,
        clock: Callable[[], float],
    ) -> None:
        self.num_hits = 0
        self._connect, self._schema, self._objects = connect, schema, objects
        self._identity, self._limits, self._clock = identity, limits, clock
        self._space = _digest(orjson.dumps(identity.labels))
        self._link: _PrefixConnection | None = None
        self._rests_until_s = clock()
        #: What memory was given or has put here, and when: no reason to fetch it.
        self._kept: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        """States of this model that all replicas have; 0 where the store does not answer."""
        return self._ask(self._count, 0)

    def put(self, evicted: Sequence[Evicted]) -> None:
        """Writes states, each once for all replicas."""
        for entry in evicted:
            if entry.prefix.num_tokens >= self._limits.min_tokens and self._is_news(entry):
                self._ask(partial(self._put, entry), None)

    def find(self, owner: str, tokens: Sequence[int], origin: str = "") -> Prefix | None:
        """The state of the longest beginning of ``tokens`` that is here and is not all of them.

        None as well where memory has that one already.
        """
        if len(tokens) <= self._limits.min_tokens:
            return None
        return self._ask(partial(self._find, owner, tokens, origin), None)

    def may_find(self, owner: str, tokens: Sequence[int], origin: str = "") -> bool:
        """See `server.sessions.origins.Prefixes`: the database knows."""
        return True

    def may_name(self, owner: str, key: bytes) -> bool:
        """The same of `named`."""
        return True

    def named(self, owner: str, key: bytes) -> Prefix | None:
        """The one of this key; None as well where memory has it already."""
        return self._ask(partial(self._named, owner, key), None)

    def sweep(self) -> None:
        """Deletes prompts' states without a row, of any replica. `put` does it as well."""
        self._ask(self._sweep, None)

    def close(self) -> None:
        """Ends the connection."""
        if self._link is not None:
            link, self._link = self._link, None
            link.objects.close()
            with suppress(psycopg.Error):
                link.table.connection.close()

    def _ask(self, ask: Callable[[_PrefixConnection], R], otherwise: R) -> R:
        """What the store says, or, where it fails, ``otherwise``."""
        if self._clock() < self._rests_until_s:
            return otherwise
        try:
            if self._link is None:
                connection = self._connect()
                table = PrefixTable(connection, self._schema)
                self._link = _PrefixConnection(table, self._objects(connection))
            return ask(self._link)
        except (psycopg.Error, StoreError, OSError) as error:
            line = str(error).strip().partition("\n")[0]
            logger.warning("the shared prefix cache failed and is not used for a while: %s", line)
            self.close()
            self._rests_until_s = self._clock() + self._limits.rest_s
            return otherwise

    # What memory has

    def _is_news(self, entry: Evicted) -> bool:
        """Also notes whether memory keeps it: no, if it comes from here and is new to memory."""
        key = entry.prefix.key
        was_kept = self._is_kept(key)
        self._kept.pop(key, None)
        if entry.kept:
            self._keep(key)
        return not (entry.kept and was_kept)

    def _is_kept(self, key: bytes) -> bool:
        since_s = self._kept.get(key)
        return since_s is not None and self._clock() - since_s <= self._limits.kept_s

    def _keep(self, key: bytes) -> None:
        self._kept[key] = self._clock()
        self._kept.move_to_end(key)
        while not self._is_kept(next(iter(self._kept))):
            self._kept.popitem(last=False)

    # With the store

    def _count(self, link: _PrefixConnection) -> int:
        with link.table.transaction():
            return link.table.count(self._space)

    def _find(
        self, owner: str, tokens: Sequence[int], origin: str, link: _PrefixConnection
    ) -> Prefix | None:
        ours = self._space, _digest(owner.encode())
        with link.table.transaction():
            lengths = link.table.lengths(*ours, self._limits.min_tokens, len(tokens))
            if not lengths:
                return None
            found_keys = keys(owner, tokens[: lengths[-1]], lengths, origin)
            return self._longest(ours, [key.hex() for key in found_keys], link)

    def _named(self, owner: str, key: bytes, link: _PrefixConnection) -> Prefix | None:
        with link.table.transaction():
            return self._longest((self._space, _digest(owner.encode())), [key.hex()], link)

    def _longest(
        self, ours: tuple[str, str], known: Sequence[str], link: _PrefixConnection
    ) -> Prefix | None:
        """The first that can be read, in a transaction; those that cannot are removed."""
        while (found := link.table.longest(*ours, known)) is not None:
            key = bytes.fromhex(found.place.key)
            if self._is_kept(key):
                return None
            hit = self._read(found, link)
            if hit is not None:
                link.table.use(found.place, self._limits.rarely_s)
                self._keep(key)
                self.num_hits += 1
                return hit
            link.table.remove(found)
        return None

    def _read(self, found: Found, link: _PrefixConnection) -> Prefix | None:
        try:
            data = link.objects.get(found.name)
            key = bytes.fromhex(found.place.key)
            return decode_prefix(data, self._identity, key, found.num_tokens)
        except (SnapshotBroken, SnapshotMismatch) as error:
            logger.warning("a cached prompt's state cannot be used: %s", error)
            return None

    def _put(self, entry: Evicted, link: _PrefixConnection) -> None:
        table, objects = link
        prefix = entry.prefix
        place = PrefixRowKey(self._space, _digest(entry.owner.encode()), prefix.key.hex())
        with table.transaction():
            if table.is_here(place):
                return
        found = Found(place, prefix.num_tokens, f"{FOLDER}{secrets.token_hex(16)}")
        parts = encode_prefix(prefix, self._identity)
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        with table.transaction(synced=True):
            table.announce(found.name, self._limits.grace_s)
        with table.transaction(synced=True):
            objects.put(found.name, parts)
        is_made = False
        with suppress(psycopg.errors.UniqueViolation), table.transaction():
            is_made = table.add(found, num_bytes, self._limits.max_bytes)
        if not is_made:  # another replica has been quicker with it, or a sweep
            with table.transaction():
                table.give_up(found.name)
        self._sweep(link)

    def _sweep(self, link: _PrefixConnection) -> None:
        """A crash in between leaves the names; what is not there can be deleted again."""
        with link.table.transaction():
            names = link.table.take_due(MAX_SWEPT)
            if names:
                link.objects.delete(names)
                link.table.forget(names)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
