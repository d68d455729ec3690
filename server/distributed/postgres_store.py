"""The store of many replicas: one PostgreSQL, in which each session belongs to one of them.

The journal's thread owns it, as it does an embedded store. After an error the connection
is given up, and the next call makes another one, which knows only what the database has.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from typing import Literal, ParamSpec, TypeVar

import psycopg

from server.distributed.database import Database, Hung, failure
from server.distributed.log import SharedLog
from server.distributed.migrations import migrate
from server.distributed.objects import Connection, Objects
from server.distributed.presence import Presence, channel_name
from server.distributed.states import SharedStates
from server.distributed.upkeep import RARELY_S, SharedConnection, SharedUpkeep
from server.engine.errors import SessionNotFound
from server.engine.value import Deleted, Entry, Record, Saved, SessionValue
from server.store.base import Events, Found, Identity, Keyed, Listed, Loaded
from server.store.clock import StoreClock
from server.store.errors import (
    Fenced,
    HeldElsewhere,
    HistoryGone,
    StoreError,
    StoreFailed,
    StoreFull,
)
from server.store.heads import Head
from server.store.history import events_after, past
from server.store.saving import Limits
from server.store.snapshots import Snapshots
from server.store.tables import Tables
from server.store.unsaved import Unsaved

logger = logging.getLogger(__name__)

Durability = Literal["full", "relaxed"]
#: Sessions that are written and let go in one transaction, after the engine has forgotten all.
RELEASED_AT_ONCE = 32
#: What may wait in memory for its place in the store.
MAX_UNSAVED_BYTES = 64 << 20

#: After a connection could not be made.
REST_S = 0.5
NOTHING: Iterable[Entry] = ()
OVER = "the session store has all the bytes that it may have"


P = ParamSpec("P")
R = TypeVar("R")


def twice(method: Callable[P, R]) -> Callable[P, R]:
    """What went with its connection is done again, once.

    A new connection begins with the certainty that nothing more comes of the old one, so
    that a database that is back at once has disturbed nobody.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except StoreFailed as error:
            cause = error.__cause__
            if not isinstance(cause, psycopg.OperationalError) or isinstance(cause, Hung):
                raise
        return method(*args, **kwargs)

    return call


@dataclass(frozen=True)
class SharedPlace:
    """Where a shared store is: the database's ``url``, and a ``schema`` in it.

    ``direct_url`` leads to the database itself where ``url`` is a pooler's. ``objects``
    opens the place of the states, over a connection for one that is in the database.
    ``address`` is what operators see of the replica.
    """

    url: str
    schema: str
    identity: Identity
    objects: Callable[[Connection], Objects]
    durability: Durability = "full"
    direct_url: str | None = None
    address: str = ""
    lease_s: float = 10.0


class PostgresStore:
    """See `server.store.base.Store` for what it does of that.

    A session that another replica has is `HeldElsewhere`.
    """

    durable = True

    def __init__(self, place: SharedPlace, limits: Limits | None = None) -> None:
        self.store_id = ""
        self._place, self._limits = place, limits or Limits()
        self._clock, self._unsaved = StoreClock(), Unsaved()
        self._connection: SharedConnection | None = None
        self._last_row: int | None = None
        self._next_key = 0
        self._held: set[str] = set()
        self._end: StoreError | None = None
        self._touched: set[int] = set()
        self._is_over = False
        self._rarely_s = self._rests_until_s = 0.0
        self._has_garbage = self._forgets = False
        self._forgotten: set[str] = set()
        self._unreturned: set[tuple[str, str]] = set()
        self._listeners: tuple[
            Callable[[str], None], Callable[[int], None], Callable[[int], None]
        ] = (lambda message: None, lambda key: None, lambda key: None)
        self.presence: Presence | None = None
        try:
            with self._connected():
                pass
        except BaseException:
            self.close()
            raise

    @property
    def key(self) -> int:
        """This replica's, at present."""
        return 0 if self.presence is None else self.presence.key

    def listen(
        self,
        hear: Callable[[str], None],
        bury: Callable[[int], None],
        left: Callable[[int], None] = lambda key: None,
    ) -> None:
        """Who is told what others ask, which are dead and which have left: in another thread."""
        self._listeners = hear, bury, left
        if self.presence is not None:
            self.presence.hear, self.presence.bury, self.presence.left = self._listeners

    # What a store does

    @twice
    def commit(self, records: Sequence[Record]) -> None:
        """See `server.store.base.Store.commit`."""
        with self._connected() as connection:
            if self._is_over and not all(isinstance(entry, Deleted) for _, entry in records):
                raise StoreFull(OVER)
            log = connection.log
            log.now_s = self._clock.now_s
            steps = log.append(records)
            try:
                log.settle(steps, self._clock.now_s)
                left = {head for head, entry, _ in steps if is_leaving(entry)}
                if left := {head for head in left if log.heads.get(head.id) is head}:
                    self._upkeep(connection).release(list(left))
                if self._unsaved.num_bytes > MAX_UNSAVED_BYTES:
                    self._upkeep(connection).save()
            except (psycopg.Error, StoreError) as error:
                # The commit is in the database, and what follows from it is found there again.
                logger.warning("the shared store is read anew: %s", failure(error).message)
                self._abandon()

    @twice
    def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
        """See `server.store.base.Store.load`; all of a session is for its holder alone.

        Nobody's is this replica's from then on. Raises `HeldElsewhere`.
        """
        with self._connected() as connection:
            head = connection.log.head(session)
            self._forgotten.discard(session)
            if head is None:
                return self._taken(connection, session, owner, at)
            if head.owner != owner:
                raise SessionNotFound
            self._touched.add(head.key)
            with self._holding(connection):
                return self._loaded(connection, head, at)

    @twice
    def read(self, session: str, owner: str, after_seq: int, max_events: int) -> Events:
        """See `server.store.base.Store.read`; whoever has the session."""
        with self._connected() as connection:
            head = connection.log.head(session)
            with connection.database.reading() if head is None else self._holding(connection):
                rest = NOTHING
                if head is None:
                    holder, head = self._away(connection, session, owner)
                    rest = connection.log.entries_away(holder, head)
                elif head.owner != owner:
                    raise SessionNotFound
                else:
                    self._touched.add(head.key)
                if after_seq < head.log_seq:
                    raise HistoryGone(f"only what came after {head.log_seq} is kept", "last_seq")
                events = events_after(
                    connection.tables.entries_after(head, after_seq), after_seq, max_events
                )
                after_seq = events[-1].seq if events else after_seq
                return events + events_after(rest, after_seq, max_events - len(events))

    @twice
    def find_key(self, owner: str, key: str) -> Keyed | None:
        """See `server.store.base.Store.find_key`."""
        with self._connected() as connection, connection.database.reading():
            return connection.tables.find_key(owner, key)

    @twice
    def list(self, owner: str | None, after: str | None, limit: int) -> Found:
        """See `server.store.base.Store.list`; what others hold may be some tokens further."""
        with self._connected() as connection, connection.database.reading():
            heads = connection.log.heads
            return [
                _listed(heads[row[0]], row[-1])
                if row[0] in heads
                else Listed(*row[:5], row[5] is not None, row[6])
                for row in connection.tables.listed(owner, after, limit)
            ]

    @twice
    def unfinished(self) -> Sequence[tuple[str, str]]:
        """See `server.store.base.Store.unfinished`; those that no other replica has."""
        query = "SELECT id, owner FROM session WHERE running IS NOT NULL AND holder IS NULL"
        with self._connected() as connection, connection.database.reading():
            owners = dict(connection.database.execute(query).fetchall())
            heads = connection.log.heads.values()
            owners |= {head.id: head.owner for head in heads if head.running is not None}
            return sorted(owners.items())

    @twice
    def stored_bytes(self, owner: str) -> int:
        """See `server.store.base.Store.stored_bytes`."""
        with self._connected() as connection, connection.database.reading():
            return connection.tables.stored_bytes(owner)

    @twice
    def maintain(self, now_s: float) -> None:
        """See `server.store.base.Store.maintain`."""
        self._clock.advance(now_s)
        with self._connected() as connection:
            connection.database.check_fence()
            upkeep = self._upkeep(connection)
            held = {head.key for head in connection.log.heads.values()}
            upkeep.run(self._touched & held)
            self._touched = set()
            if now_s - self._rarely_s >= RARELY_S:
                self._rarely_s, self._has_garbage = now_s, True
                self._is_over = upkeep.measure()
            self._has_garbage = self._has_garbage and upkeep.take_out_garbage()
            self._let_go_of_forgotten(connection)
            self._return_keys(connection)
        if self._is_over:
            raise StoreFull(OVER)

    def close(self) -> None:
        """See `server.store.base.Store.close`. Everybody may have what this replica had."""
        if self._connection is not None:
            try:
                self._upkeep(self._connection).release([*self._connection.log.heads.values()])
                self._leave(self._connection.database)
            except (psycopg.Error, StoreError) as error:
                logger.warning("the shared store could not be left cleanly: %s", error)
            self._abandon()
        if self.presence is not None:
            self.presence.close()
        self._end = self._end or StoreError("the session store is closed")

    def forget(self) -> None:
        """See `server.store.base.Store.forget`: others may have what was the engine's."""
        self._forgets = True
        self._note_forgotten()

    def _note_forgotten(self) -> None:
        if self._forgets and self._connection is not None:
            self._forgotten |= self._connection.log.heads.keys()
            self._forgets = False

    def _let_go_of_forgotten(self, connection: SharedConnection) -> None:
        """Some of them, so that no commit waits for all."""
        some = [*islice(self._forgotten, RELEASED_AT_ONCE)]
        heads = [head for id in some if (head := connection.log.head(id)) is not None]
        if heads:
            self._upkeep(connection).release(heads)
        self._forgotten.difference_update(some)

    # What only a shared store does

    @twice
    def release(self, session: str) -> None:
        """Lets a session go that the engine does not have, so that another replica may take it."""
        with self._connected() as connection:
            head = connection.log.head(session)
            if head is not None:
                self._upkeep(connection).release([head])

    @twice
    def tell(self, key: int, message: str) -> None:
        """What another replica shall hear."""
        with self._connected() as connection, connection.database.transaction(synced=False):
            name = channel_name(self._place.schema, key)
            connection.database.execute("SELECT pg_notify(?, ?)", (name, message))

    @twice
    def bury(self, key: int) -> bool:
        """Makes everything that a dead replica held nobody's; whether it was still there.

        From then on it can neither write nor connect, should it wake.
        """
        with self._connected() as connection:
            database = connection.database
            with database.transaction():
                # Not waited for: it is asked again at once, and others wait for this thread.
                lock = "SELECT pg_try_advisory_xact_lock(hashtext(current_schema()), ?::int)"
                if not database.execute(lock, (key,)).fetchall()[0][0]:
                    return False
                gone = database.execute("DELETE FROM replica WHERE key = ? RETURNING key", (key,))
                if not gone.fetchall():
                    return False
                log = SharedLog(database, connection.tables, connection.snapshots, Unsaved(), key)
                log.recover(None, (), self._clock.now_s)
                heads = [*log.heads.values()]
                log.store_tails(heads, log.last_row, self._clock.now_s)
                log.let_go(heads)
                database.execute("DELETE FROM journal WHERE replica = ?", (key,))
            logger.warning("replica %d is gone; it had %d sessions", key, len(heads))
            return True

    @twice
    def claim_key(self, owner: str, key: str) -> bool:
        """Whether this replica may begin what comes under ``key``: no other is about to."""
        claim = (
            "INSERT INTO key_claim VALUES (?, ?, ?) ON CONFLICT (owner, key) DO UPDATE "
            "SET replica = excluded.replica WHERE key_claim.replica = excluded.replica "
            "RETURNING key"
        )
        with self._connected() as connection:
            database = connection.database
            with database.transaction(synced=False):
                return bool(database.execute(claim, (owner, key, database.me)).fetchall())

    @twice
    def give_back_key(self, owner: str, key: str) -> None:
        """After `claim_key`, when what came under it is in the log, or will never be.

        What cannot be given back now is by `maintain`.
        """
        self._unreturned.add((owner, key))
        with self._connected() as connection:
            self._return_keys(connection)

    def _return_keys(self, connection: SharedConnection) -> None:
        if not self._unreturned:
            return
        database = connection.database
        query = "DELETE FROM key_claim WHERE owner = ? AND key = ? AND replica = ?"
        with database.transaction(synced=False):
            for owner, key in self._unreturned:
                database.execute(query, (owner, key, database.me))
        self._unreturned.clear()

    @twice
    def signing_key(self) -> bytes:
        """Made with the store, and the same for all replicas."""
        with self._connected() as connection, connection.database.whole():
            database = connection.database
            database.execute(
                "INSERT INTO meta VALUES ('signing_key', ?) ON CONFLICT DO NOTHING",
                (secrets.token_hex(32),),
            )
            return bytes.fromhex(str(database.meta("signing_key")))

    # The connection

    @contextmanager
    def _connected(self) -> Iterator[SharedConnection]:
        """The connection, another one if need be; its errors as those of a store."""
        if self._end is not None:
            raise type(self._end)(self._end.message)
        if self._connection is None and time.monotonic() < self._rests_until_s:
            raise StoreFailed("the shared store failed a moment ago; try again later")
        try:
            yield self._connection or self._connect()
        except Fenced as error:
            self._end = error
            self._abandon()
            raise
        except StoreFailed as error:
            if isinstance(error.__cause__, psycopg.Error):  # of states in a table
                self._abandon()
            raise
        except (psycopg.Error, OSError) as error:
            self._abandon()
            raise failure(error) from error

    def _connect(self) -> SharedConnection:
        """Whatever waits for this thread must not wait for one attempt after the other."""
        place = self._place
        is_pooled = place.direct_url is not None
        try:
            database = Database(place.url, place.schema, place.durability == "full", is_pooled)
            try:
                connection = self._open(database)
            except BaseException:
                database.close()
                raise
        except BaseException:
            self._rests_until_s = time.monotonic() + REST_S
            raise
        self._connection = connection
        self._note_forgotten()
        return connection

    def _open(self, database: Database) -> SharedConnection:
        migrate(database)
        store_id = _store_id(database)
        if store_id != self.store_id:
            self._begin_anew(store_id)
        assert self.presence is not None
        database.me = self.presence.key
        database.link = _new_link(database)
        tables = Tables(database)
        states = SharedStates(
            database, self._place.objects(database.connection), self._place.identity
        )
        snapshots = Snapshots(database, self._place.identity, states)
        log = SharedLog(database, tables, snapshots, self._unsaved, database.me)
        log.next_key = max(log.next_key, self._next_key)
        held = self._held if self._last_row is not None else ()
        with database.transaction():
            stored_s = float(database.meta("clock_s") or 0.0)
            self._clock.set(max(stored_s, self._clock.now_s))
            snapshots.prepare()
            log.recover(self._last_row, held, self._clock.now_s)
        for save in self._unsaved.oldest(None):
            if log.head(save.value.id) is None:  # let go in a transaction of which nobody heard
                self._unsaved.drop(save.value.id)
        return SharedConnection(database, log, tables, snapshots, states, self._unsaved)

    def _begin_anew(self, store_id: str) -> None:
        """Another store, or the first: nothing that was known of an earlier one is true of it."""
        if self.presence is not None:
            self.presence.close()
        place = self._place
        url = place.direct_url or place.url
        self.presence = Presence(url, place.schema, place.address, place.lease_s)
        self.listen(*self._listeners)
        self.presence.start()
        self._unsaved.clear()
        self._last_row, self._next_key = None, 0
        self.store_id = store_id

    def _abandon(self) -> None:
        """Gives up a connection that may have been wrong about the database."""
        if self._connection is not None:
            log = self._connection.log
            self._last_row, self._next_key = log.last_row, log.next_key
            self._held = {head.id for head in log.heads.values() if head.is_held}
            self._connection.database.close()
            self._connection.states.close()
            self._connection = None

    def _leave(self, database: Database) -> None:
        with database.transaction():
            for table, column in (("journal", "replica"), ("replica", "key")):
                database.execute(f"DELETE FROM {table} WHERE {column} = ?", (database.me,))  # noqa: S608

    def _upkeep(self, connection: SharedConnection) -> SharedUpkeep:
        return SharedUpkeep(connection, self._clock, self._limits)

    # Sessions

    def _holding(self, connection: SharedConnection) -> AbstractContextManager[None]:
        """A transaction in which what this replica believes to hold is its own."""
        return connection.database.transaction(synced=False)

    def _taken(
        self, connection: SharedConnection, session: str, owner: str, at: int | None
    ) -> Loaded:
        """A session that was nobody's, unless it cannot be loaded: then it stays so."""
        try:
            with connection.database.transaction(synced=False):
                while (head := connection.log.take(session, owner)) is None:
                    holder, _ = self._away(connection, session, owner)
                    if holder is not None:
                        raise HeldElsewhere(holder)
                self._touched.add(head.key)
                return self._loaded(connection, head, at)
        except BaseException:
            connection.log.heads.pop(session, None)
            raise

    def _away(
        self, connection: SharedConnection, session: str, owner: str
    ) -> tuple[int | None, Head]:
        found = connection.log.away(session)
        if found is None or found[1].owner != owner:
            raise SessionNotFound
        return found

    def _loaded(self, connection: SharedConnection, head: Head, at: int | None) -> Loaded:
        for place, value in self._values(connection, head, at):
            entries: list[Entry] | None = connection.tables.entries(head, place)
            if entries is None:
                break
            return Loaded(value, past(entries, value.length, at))
        raise HistoryGone("the session's state at this point is no longer kept", "at")

    def _values(
        self, connection: SharedConnection, head: Head, at: int | None
    ) -> Iterator[tuple[int, SessionValue]]:
        """Place and value of the snapshots of at most ``at`` tokens, newest first."""
        save = self._unsaved.get(head.id)
        if save is not None and (at is None or save.value.length <= at):
            yield save.place, save.value
        yield from connection.snapshots.newest(head.key, at)


def is_leaving(entry: Entry) -> bool:
    """Whether the engine has let the session go."""
    return isinstance(entry, Saved) and entry.evicted


def _store_id(database: Database) -> str:
    with database.whole():
        database.execute(
            "INSERT INTO meta VALUES ('store_id', replace(gen_random_uuid()::text, '-', '')) "
            "ON CONFLICT DO NOTHING"
        )
        return str(database.meta("store_id"))[:16]


def _new_link(database: Database) -> int:
    """This connection's number: what an earlier one has not done by now it never will.

    Raises `Fenced`.
    """
    with database.whole():
        lock = "SELECT pg_advisory_xact_lock(hashtext(current_schema()), ?::int)"
        database.execute(lock, (database.me,))
        query = "UPDATE replica SET link = link + 1 WHERE key = ? RETURNING link"
        for (link,) in database.execute(query, (database.me,)):
            return int(link)
    raise Fenced("another replica has taken over what this one had")


def _listed(head: Head, num_bytes: int) -> Listed:
    is_running = head.running is not None
    return Listed(head.id, head.owner, head.epoch, head.length, head.seq, is_running, num_bytes)
