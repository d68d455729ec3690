"""What ties a replica to its store: a connection, made again after an error, and its presence.

After an error the connection is given up, and the next call makes another one, which
knows only what the database has.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import psycopg

from server.store.base import Identity
from server.store.errors import Fenced, RecordRefused, StoreError, StoreFailed
from server.store.object_storage.objects import Connection, Objects
from server.store.postgres.connecting import Hung
from server.store.postgres.database import ERRORS, FENCED, REFUSALS, PostgresDatabase, failure
from server.store.postgres.log import SharedLog
from server.store.postgres.migrations import migrate
from server.store.postgres.presence import Presence
from server.store.postgres.states import SharedStates
from server.store.redo import Wanted, everyone, recover, without_refused
from server.store.saving import Durability, StoreClock
from server.store.snapshots import Snapshots, Unsaved
from server.store.tables import Tables

logger = logging.getLogger(__name__)

#: After a connection could not be made.
REST_S = 0.5

#: The connection has gone, or what it was asked has had no effect.
_GONE = (psycopg.OperationalError, psycopg.errors.IdleInTransactionSessionTimeout)

P = ParamSpec("P")
R = TypeVar("R")


def retried_once(method: Callable[P, R]) -> Callable[P, R]:
    """What went with its connection is done again, once.

    A new connection begins with the certainty that nothing more comes of the old one, so
    that a short outage of the database goes unnoticed. It also begins by putting
    into quarantine what the database has refused.
    """

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except (StoreFailed, RecordRefused) as error:
            cause = error.__cause__
            if not isinstance(cause, (*_GONE, *REFUSALS)):
                raise
            if isinstance(cause, Hung):
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


class Listeners(NamedTuple):
    """See `Presence`."""

    hear: Callable[[str], None] = lambda message: None
    reclaim: Callable[[int], None] = lambda key: None
    left: Callable[[int], None] = lambda key: None


@dataclass(frozen=True)
class SharedConnection:
    """What is known through one connection; see `server.store.sqlite.connection.Connection`."""

    database: PostgresDatabase
    log: SharedLog
    tables: Tables
    snapshots: Snapshots
    states: SharedStates
    unsaved: Unsaved


class Link:
    """``connection`` is the present one, if there is any; ``on_connect`` gets each new one.

    ``store_id`` and ``presence`` are of the store that it leads to, which may become
    another one.
    """

    def __init__(
        self,
        place: SharedPlace,
        clock: StoreClock,
        on_connect: Callable[[SharedConnection], None],
    ) -> None:
        self.store_id = ""
        self.presence: Presence | None = None
        self.connection: SharedConnection | None = None
        self._place, self._clock, self._on_connect = place, clock, on_connect
        self._listeners = Listeners()
        self._unsaved = Unsaved()
        self._last_row: int | None = None
        self._next_key = 0
        self._held: set[str] = set()
        self._end: StoreError | None = None
        self._skips_refused = False
        self._rests_until_s = 0.0

    @contextmanager
    def connected(self) -> Iterator[SharedConnection]:
        """The connection, another one if need be; its errors as those of a store."""
        if self._end is not None:
            raise type(self._end)(self._end.message)
        if self.connection is None and time.monotonic() < self._rests_until_s:
            raise StoreFailed("the shared store failed a moment ago; try again later")
        try:
            yield self.connection or self._connect()
        except Fenced as error:
            self._end = error
            self.abandon()
            raise
        except StoreFailed as error:
            if isinstance(error.__cause__, psycopg.Error):  # of states in a table
                self.abandon()
            raise
        except ERRORS as error:
            self.abandon()
            self._skips_refused = self._skips_refused or isinstance(error, REFUSALS)
            raise failure(error) from error

    def skip_refused(self) -> None:
        """Gives the connection up; the next one finds the sessions whose data are refused."""
        self._skips_refused = True
        self.abandon()

    def abandon(self) -> None:
        """Gives up a connection that may have been wrong about the database."""
        if self.connection is not None:
            log = self.connection.log
            self._last_row, self._next_key = log.last_row, log.next_key
            self._held = {head.id for head in log.heads.values() if head.is_held}
            self.connection.database.close()
            self.connection.states.close()
            self.connection = None

    def listen(self, listeners: Listeners) -> None:
        """The receiver of the notices that the presence gets, and of what it observes."""
        self._listeners = listeners
        if self.presence is not None:
            self.presence.hear, self.presence.reclaim, self.presence.left = listeners

    def close(self) -> None:
        """Ends the connection and the presence; the store cannot be used again."""
        self.abandon()
        if self.presence is not None:
            self.presence.close()
        self._end = self._end or StoreError("the session store is closed")

    def _connect(self) -> SharedConnection:
        """Whatever waits for this thread must not wait for one attempt after the other."""
        place = self._place
        is_pooled = place.direct_url is not None
        try:
            database = PostgresDatabase(
                place.url, place.schema, place.durability == "full", is_pooled
            )
            try:
                connection = self._open(database)
            except BaseException:
                database.close()
                raise
        except BaseException:
            self._rests_until_s = time.monotonic() + REST_S
            raise
        self.connection = connection
        self._on_connect(connection)
        return connection

    def _open(self, database: PostgresDatabase) -> SharedConnection:
        migrate(database)
        with database.whole():
            store_id = database.meta_once("store_id", secrets.token_hex(16))[:16]
        if store_id != self.store_id:
            self._begin_again(store_id)
        assert self.presence is not None
        database.me = self.presence.key
        database.link = _new_link(database)
        tables = Tables(database)
        states = SharedStates(
            database, self._place.objects(database.connection), self._place.identity
        )
        snapshots = Snapshots(database, self._place.identity, states)

        def new_log() -> SharedLog:
            log = SharedLog(database, tables, snapshots, self._unsaved, database.me)
            log.next_key = max(log.next_key, self._next_key)
            return log

        with database.transaction():
            stored_s = float(database.meta("clock_s") or 0.0)
            self._clock.set(max(stored_s, self._clock.now_s))
            snapshots.prepare()
        log = self._recovered(database, new_log)
        if self._skips_refused:
            self._unsaved.clear()  # one of them may be at fault; sessions continue by a replay
            self._skips_refused = False
        for save in self._unsaved.oldest(None):
            if log.head(save.value.id) is None:  # released by a transaction whose answer was lost
                self._unsaved.drop(save.value.id)
        return SharedConnection(database, log, tables, snapshots, states, self._unsaved)

    def _recovered(self, database: PostgresDatabase, new_log: Callable[[], SharedLog]) -> SharedLog:
        """The journal, read as a whole, and session by session where that is refused."""
        last_row, now_s = self._last_row, self._clock.now_s
        held = self._held if last_row is not None else ()

        def read(is_wanted: Wanted = everyone) -> SharedLog:
            return recover(new_log(), last_row, held, now_s, is_wanted)

        if not self._skips_refused:
            with suppress(*REFUSALS), database.transaction():
                return read()
        with database.transaction(pipelined=False):  # it has parts that fail
            return without_refused(database, REFUSALS, read, now_s)

    def _begin_again(self, store_id: str) -> None:
        """Another store, or the first: nothing that was known of an earlier one is true of it."""
        if self.presence is not None:
            self.presence.close()
        place = self._place
        url = place.direct_url or place.url
        self.presence = Presence(url, place.schema, place.address, place.lease_s)
        self.listen(self._listeners)
        self.presence.start()
        self._unsaved.clear()
        self._last_row, self._next_key = None, 0
        self.store_id = store_id


def _new_link(database: PostgresDatabase) -> int:
    """This connection's number: what an earlier one has not done by now it never will.

    Raises `Fenced`.
    """
    with database.whole():
        lock = "SELECT pg_advisory_xact_lock(hashtext(current_schema()), ?::int)"
        database.execute(lock, (database.me,))
        query = "UPDATE replica SET link = link + 1 WHERE key = ? RETURNING link"
        for (link,) in database.execute(query, (database.me,)):
            return int(link)
    raise Fenced(FENCED)
