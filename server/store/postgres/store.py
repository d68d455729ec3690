"""The store of many replicas: one PostgreSQL, in which each session belongs to one of them.

The store thread owns it, as it does an embedded store.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

import psycopg

from server.engine.value import Deleted, Record, Saved
from server.errors import SessionNotFound
from server.store.base import Loaded
from server.store.errors import RecordRefused, StoreError, StoreFull
from server.store.files import Chunk
from server.store.postgres.database import ERRORS, REFUSALS, failure
from server.store.postgres.holdings import KeyClaims, away, held, reclaim, taken
from server.store.postgres.link import Link, Listeners, SharedConnection, SharedPlace, retried_once
from server.store.postgres.presence import Presence, channel_name
from server.store.postgres.upkeep import Rounds, SharedUpkeep
from server.store.saving import MAX_UNSAVED_BYTES, OVER, SAVED_AT_ONCE, StoreLimits
from server.store.table_store import OfSession, TableStore, loaded

logger = logging.getLogger(__name__)

R = TypeVar("R")


class PostgresStore(TableStore):
    """See `server.store.base.Store` for what it does of that.

    A session that another replica has is `OwnedElsewhere`. ``presence`` and ``key`` are this
    replica's, of the store that it is connected to.
    """

    durable = True

    def __init__(self, place: SharedPlace, limits: StoreLimits | None = None) -> None:
        super().__init__()
        self._schema = place.schema
        self._limits, self._rounds = limits or StoreLimits(), Rounds()
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

    @retried_once
    def commit(self, records: Sequence[Record]) -> None:
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
                left = {h for h, entry, _ in steps if isinstance(entry, Saved) and entry.evicted}
                if left := {head for head in left if log.heads.get(head.id) is head}:
                    self._upkeep.release(list(left))
                if connection.unsaved.num_bytes > MAX_UNSAVED_BYTES:
                    self._upkeep.save(SAVED_AT_ONCE)
            except REFUSALS as error:
                logger.error("reloading the shared store: %s", failure(error).message)
                self._link.skip_refused()
            except (psycopg.Error, StoreError) as error:
                # The commit is in the database, and what follows from it is found there again.
                logger.warning("reloading the shared store: %s", failure(error).message)
                self._link.abandon()

    @retried_once
    def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
        """All of a session is for its holder alone. One that no replica holds is this one's then.

        Raises `OwnedElsewhere`.
        """
        with self._link.connected() as connection:
            self._rounds.forgotten.discard(session)
            head = held(connection, session, owner)
            if head is None:
                head, found = taken(connection, session, owner, at)
            else:
                with connection.database.transaction(synced=False):
                    found = loaded(connection, head, (), at)
            self._touched.add(head.key)
            return found

    @retried_once
    def _ask(self, ask: Callable[[SharedConnection], R]) -> R:
        """What the database says, all of one moment."""
        with self._link.connected() as connection, connection.database.reading():
            return ask(connection)

    @retried_once
    def _ask_of(self, session: str, owner: str, ask: OfSession[R]) -> R:
        """Also of a session of another replica; all of one moment."""
        with self._link.connected() as connection:
            head = held(connection, session, owner)
            if head is not None:
                self._touched.add(head.key)
                with connection.database.transaction(synced=False):
                    return ask(connection, head, ())
            with connection.database.reading():
                holder, head = away(connection, session, owner)
                return ask(connection, head, connection.log.entries_away(holder, head))

    @retried_once
    def discard(self, session: str, owner: str) -> None:
        with self._link.connected() as connection, connection.database.transaction():
            head = connection.log.take(session, owner)
            if head is None:
                raise SessionNotFound
            connection.log.delete(head, self._clock.now_s)

    def unfinished(self) -> Sequence[tuple[str, str]]:
        """Those that no other replica has."""

        def ask(connection: SharedConnection) -> Sequence[tuple[str, str]]:
            query = "SELECT id, owner FROM session WHERE running IS NOT NULL AND holder IS NULL"
            owners = dict(connection.database.execute(query).fetchall())
            heads = connection.log.heads.values()
            owners |= {head.id: head.owner for head in heads if head.running is not None}
            return sorted(owners.items())

        return self._ask(ask)

    def named_states(self) -> dict[str, str]:
        """Those of all replicas."""
        query = "SELECT name, digest FROM named_state"
        return self._ask(lambda connection: dict(connection.database.execute(query).fetchall()))

    def read_named(self, name: str) -> bytes | None:
        query = "SELECT data FROM named_state WHERE name = ?"
        rows = self._ask(lambda by: by.database.execute(query, (name,)).fetchall())
        return bytes(rows[0][0]) if rows else None

    @retried_once
    def put_named(self, name: str, digest: str, parts: Sequence[Chunk]) -> None:
        query = (
            "INSERT INTO named_state VALUES (?, ?, ?) ON CONFLICT (name) "
            "DO UPDATE SET digest = excluded.digest, data = excluded.data"
        )
        with self._link.connected() as connection, connection.database.transaction():
            connection.database.execute(query, (name, digest, b"".join(parts)))

    @retried_once
    def drop_named(self, name: str) -> bool:
        query = "DELETE FROM named_state WHERE name = ? RETURNING name"
        with self._link.connected() as connection, connection.database.transaction():
            return bool(connection.database.execute(query, (name,)).fetchall())

    @retried_once
    def maintain(self, now_s: float) -> bool:
        self._clock.advance(now_s)
        with self._link.connected() as connection:
            connection.database.check_fence()
            has_more = self._rounds.turn(self._upkeep, now_s, self._touched)
            self._touched = set()
            self._claims.give_back(connection.database)
        if self._rounds.is_over:
            raise StoreFull(OVER)
        return has_more

    def close(self) -> None:
        """Releases the sessions of this replica."""
        connection = self._link.connection
        if connection is not None:
            try:
                self._upkeep.release([*connection.log.heads.values()])
                database = connection.database
                with database.transaction():
                    database.execute("DELETE FROM journal WHERE replica = ?", (database.me,))
                    database.execute("DELETE FROM replica WHERE key = ?", (database.me,))
            except (*ERRORS, StoreError) as error:
                logger.warning("the session store could not be closed cleanly: %s", error)
        self._link.close()

    def forget(self) -> None:
        """The sessions that the engine had are released, some at a time."""
        self._rounds.forget(self._link.connection)

    def _note_connection(self, connection: SharedConnection) -> None:
        self.store_id, self.presence = self._link.store_id, self._link.presence
        self.key = connection.database.me
        self._upkeep = SharedUpkeep(connection, self._clock, self._limits)
        self._rounds.note_connection(connection)

    # What only a shared store does

    @retried_once
    def release(self, session: str) -> None:
        """Releases a session that the engine does not have; another replica may then acquire it."""
        with self._link.connected():
            self._upkeep.release_if_held([session])

    @retried_once
    def tell(self, key: int, message: str) -> None:
        """What another replica shall hear."""
        with self._link.connected() as connection, connection.database.transaction(synced=False):
            name = channel_name(self._schema, key)
            connection.database.execute("SELECT pg_notify(?, ?)", (name, message))

    @retried_once
    def reclaim(self, key: int) -> bool:
        """Releases everything that a dead replica held; whether it was still there.

        From then on it can neither write nor connect, should it wake.
        """
        with self._link.connected() as connection:
            return reclaim(connection, key, self._clock.now_s)

    @retried_once
    def claim_key(self, owner: str, key: str) -> bool:
        """Whether this replica may begin what comes under ``key``: no other is about to."""
        with self._link.connected() as connection:
            return self._claims.claim(connection.database, owner, key)

    @retried_once
    def give_back_key(self, owner: str, key: str) -> None:
        """After `claim_key`, when what came under it is in the log, or will never be.

        What cannot be given back now is by `maintain`.
        """
        self._claims.note_return(owner, key)
        with self._link.connected() as connection:
            self._claims.give_back(connection.database)

    @retried_once
    def signing_key(self) -> bytes:
        """Made with the store, and the same for all replicas."""
        with self._link.connected() as connection, connection.database.whole():
            key = connection.database.meta_once("signing_key", secrets.token_hex(32))
            return bytes.fromhex(key)
