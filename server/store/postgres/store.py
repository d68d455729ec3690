"""The store of many replicas: one PostgreSQL, in which each session belongs to one of them.

The store thread owns it, as it does an embedded store.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import psycopg

from server.engine.value import Deleted, Entry, Record, Saved
from server.errors import SessionNotFound
from server.store import reading
from server.store.base import Events, Found, Keyed, Loaded, Numbered
from server.store.clock import StoreClock
from server.store.errors import RecordRefused, StoreError, StoreFull
from server.store.files import Chunk
from server.store.heads import Head
from server.store.postgres import holdings, named_states, reclaiming
from server.store.postgres.database import ERRORS, REFUSALS, PostgresDatabase, failure
from server.store.postgres.key_claims import KeyClaims
from server.store.postgres.link import Link, Listeners, SharedConnection, SharedPlace, twice
from server.store.postgres.presence import Presence, channel_name
from server.store.postgres.rounds import Rounds
from server.store.saving import MAX_UNSAVED_BYTES, OVER, SAVED_AT_ONCE, StoreLimits

logger = logging.getLogger(__name__)

R = TypeVar("R")


class PostgresStore:
    """See `server.store.base.Store` for what it does of that.

    A session that another replica has is `OwnedElsewhere`. ``presence`` and ``key`` are this
    replica's, of the store that it is connected to.
    """

    durable = True

    def __init__(self, place: SharedPlace, limits: StoreLimits | None = None) -> None:
        self._schema, self._clock = place.schema, StoreClock()
        self._rounds = Rounds(self._clock, limits or StoreLimits())
        self.store_id, self.key = "", 0
        self.presence: Presence | None = None
        self._link = Link(place, self._clock, self._note_connection)
        self._claims = KeyClaims()
        try:
            with self._link.connected():
                pass
        except BaseException:
            self.close()
            raise

    def listen(
        self,
        hear: Callable[[str], None],
        reclaim: Callable[[int], None],
        left: Callable[[int], None] = lambda key: None,
    ) -> None:
        """Calls these in another thread: for others' requests, and when one is dead or left."""
        self._link.listen(Listeners(hear, reclaim, left))

    # What a store does

    @twice
    def commit(self, records: Sequence[Record]) -> None:
        """See `server.store.base.Store.commit`."""
        with self._link.connected() as connection:
            if self._rounds.is_over and not all(isinstance(entry, Deleted) for _, entry in records):
                raise StoreFull(OVER)
            log = connection.log
            log.now_s = self._clock.now_s
            try:
                steps = log.append(records)
            except REFUSALS as error:  # nothing has changed: the connection is good
                raise RecordRefused(error) from None
            try:
                log.settle(steps, self._clock.now_s)
                left = {head for head, entry, _ in steps if is_leaving(entry)}
                if left := {head for head in left if log.heads.get(head.id) is head}:
                    self._rounds.upkeep(connection).release(list(left))
                if connection.unsaved.num_bytes > MAX_UNSAVED_BYTES:
                    self._rounds.upkeep(connection).save(SAVED_AT_ONCE)
            except REFUSALS as error:
                logger.error("reloading the shared store: %s", failure(error).message)
                self._link.sift()
            except (psycopg.Error, StoreError) as error:
                # The commit is in the database, and what follows from it is found there again.
                logger.warning("reloading the shared store: %s", failure(error).message)
                self._link.abandon()

    @twice
    def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
        """See `server.store.base.Store.load`; all of a session is for its holder alone.

        One that no replica holds is this one's from then on. Raises `OwnedElsewhere`.
        """
        with self._link.connected() as connection:
            self._rounds.forgotten.discard(session)
            head = holdings.held(connection, session, owner)
            if head is None:
                head, loaded = holdings.taken(connection, session, owner, at)
                self._rounds.touched.add(head.key)
                return loaded
            self._rounds.touched.add(head.key)
            with holdings.holding(connection):
                return reading.loaded(connection, head, at)

    @twice
    def read(self, session: str, owner: str, after_seq: int, max_events: int) -> Events:
        """See `server.store.base.Store.read`; also of a session of another replica."""
        with self._seen(session, owner) as (connection, head, rest):
            return reading.events(connection, head, after_seq, max_events, rest)

    @twice
    def discard(self, session: str, owner: str) -> None:
        """See `server.store.base.Store.discard`."""
        with self._link.connected() as connection, connection.database.transaction():
            head = connection.log.take(session, owner)
            if head is None:
                raise SessionNotFound
            connection.log.delete(head, self._clock.now_s)

    @twice
    def entries(self, session: str, owner: str, place: int, max_entries: int) -> Numbered:
        """See `server.store.base.Store.entries`; also of a session of another replica."""
        with self._seen(session, owner) as (connection, head, rest):
            return reading.entries(connection, head, place, max_entries, rest)

    @twice
    def log_end(self, session: str, owner: str) -> int:
        """See `server.store.base.Store.log_end`; also of a session of another replica."""
        with self._seen(session, owner) as (_, head, rest):
            return reading.log_end(head, rest)

    def find_key(self, owner: str, key: str) -> Keyed | None:
        """See `server.store.base.Store.find_key`."""
        return self._ask(lambda connection: connection.tables.find_key(owner, key))

    def list(self, owner: str | None, after: str | None, limit: int) -> Found:
        """See `server.store.base.Store.list`; what others hold may be some tokens further."""
        return self._ask(lambda connection: reading.listed(connection, owner, after, limit))

    @twice
    def unfinished(self) -> Sequence[tuple[str, str]]:
        """See `server.store.base.Store.unfinished`; those that no other replica has."""
        query = "SELECT id, owner FROM session WHERE running IS NOT NULL AND holder IS NULL"
        with self._link.connected() as connection, connection.database.reading():
            owners = dict(connection.database.execute(query).fetchall())
            heads = connection.log.heads.values()
            owners |= {head.id: head.owner for head in heads if head.running is not None}
            return sorted(owners.items())

    def stored_bytes(self, owner: str) -> int:
        """See `server.store.base.Store.stored_bytes`."""
        return self._ask(lambda connection: connection.tables.stored_bytes(owner))

    def named_states(self) -> dict[str, str]:
        """See `server.store.base.Store.named_states`; those of all replicas."""
        return self._ask(lambda connection: named_states.digests(connection.database))

    def read_named(self, name: str) -> bytes | None:
        """See `server.store.base.Store.read_named`."""
        return self._ask(lambda connection: named_states.read(connection.database, name))

    @twice
    def put_named(self, name: str, digest: str, parts: Sequence[Chunk]) -> None:
        """See `server.store.base.Store.put_named`."""
        with self._link.connected() as connection, connection.database.transaction():
            named_states.put(connection.database, name, digest, parts)

    @twice
    def drop_named(self, name: str) -> bool:
        """See `server.store.base.Store.drop_named`."""
        with self._link.connected() as connection, connection.database.transaction():
            return named_states.drop(connection.database, name)

    @twice
    def maintain(self, now_s: float) -> bool:
        """See `server.store.base.Store.maintain`."""
        self._clock.advance(now_s)
        with self._link.connected() as connection:
            connection.database.check_fence()
            has_more = self._rounds.turn(connection, now_s)
            self._claims.give_back(connection.database)
        if self._rounds.is_over:
            raise StoreFull(OVER)
        return has_more

    def close(self) -> None:
        """See `server.store.base.Store.close`. Everybody may have what this replica had."""
        connection = self._link.connection
        if connection is not None:
            try:
                self._rounds.upkeep(connection).release([*connection.log.heads.values()])
                _leave(connection.database)
            except (*ERRORS, StoreError) as error:
                logger.warning("the session store could not be closed cleanly: %s", error)
        self._link.close()

    def forget(self) -> None:
        """See `server.store.base.Store.forget`: others may have what was the engine's."""
        self._rounds.forget(self._link.connection)

    def _note_connection(self, connection: SharedConnection) -> None:
        self.store_id, self.presence = self._link.store_id, self._link.presence
        self.key = connection.database.me
        self._rounds.note_connection(connection)

    # What only a shared store does

    @twice
    def release(self, session: str) -> None:
        """Lets a session go that the engine does not have, so that another replica may take it."""
        with self._link.connected() as connection:
            head = connection.log.head(session)
            if head is not None:
                self._rounds.upkeep(connection).release([head])

    @twice
    def tell(self, key: int, message: str) -> None:
        """What another replica shall hear."""
        with self._link.connected() as connection, connection.database.transaction(synced=False):
            name = channel_name(self._schema, key)
            connection.database.execute("SELECT pg_notify(?, ?)", (name, message))

    @twice
    def reclaim(self, key: int) -> bool:
        """Releases everything that a dead replica held; whether it was still there.

        From then on it can neither write nor connect, should it wake.
        """
        with self._link.connected() as connection:
            return reclaiming.reclaim(connection, key, self._clock.now_s)

    @twice
    def claim_key(self, owner: str, key: str) -> bool:
        """Whether this replica may begin what comes under ``key``: no other is about to."""
        with self._link.connected() as connection:
            return self._claims.claim(connection.database, owner, key)

    @twice
    def give_back_key(self, owner: str, key: str) -> None:
        """After `claim_key`, when what came under it is in the log, or will never be.

        What cannot be given back now is by `maintain`.
        """
        self._claims.note_return(owner, key)
        with self._link.connected() as connection:
            self._claims.give_back(connection.database)

    @twice
    def signing_key(self) -> bytes:
        """Made with the store, and the same for all replicas."""
        with self._link.connected() as connection, connection.database.whole():
            key = connection.database.meta_once("signing_key", secrets.token_hex(32))
            return bytes.fromhex(key)

    @twice
    def _ask(self, ask: Callable[[SharedConnection], R]) -> R:
        """What the database says, all of one moment."""
        with self._link.connected() as connection, connection.database.reading():
            return ask(connection)

    @contextmanager
    def _seen(
        self, session: str, owner: str
    ) -> Iterator[tuple[SharedConnection, Head, Iterable[Entry]]]:
        """A session of any replica, and its entries after ``head``, all of one moment."""
        with self._link.connected() as connection:
            head = holdings.held(connection, session, owner)
            if head is not None:
                self._rounds.touched.add(head.key)
                with holdings.holding(connection):
                    yield connection, head, ()
                return
            with connection.database.reading():
                holder, head = holdings.away(connection, session, owner)
                yield connection, head, connection.log.entries_away(holder, head)


def is_leaving(entry: Entry) -> bool:
    """Whether the engine has let the session go."""
    return isinstance(entry, Saved) and entry.evicted


def _leave(database: PostgresDatabase) -> None:
    with database.transaction():
        for table, column in (("journal", "replica"), ("replica", "key")):
            database.execute(f"DELETE FROM {table} WHERE {column} = ?", (database.me,))  # noqa: S608
