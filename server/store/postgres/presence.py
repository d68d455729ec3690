"""A replica among others: that it lives, whether they do, and what they ask of it.

Each has one connection of its own that does nothing else. It holds an advisory lock,
which PostgreSQL frees the moment the process is gone, and raises a counter now and
then. A replica that sees a lock free for `GRACE_S`, or a counter still for a whole lease by
its own clock, calls that replica dead. A mistake costs a restart and nothing more:
the key of a replica is a fence that the database itself compares at every commit.

A replica watches its next two neighbours in the ring of keys: however many there are,
the work of each is the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from server.store.postgres.connecting import connect

logger = logging.getLogger("everstream.presence")

WATCH_S = 0.1
#: For how long a lock must be free: a connection that broke is there again by then.
GRACE_S = 0.2
#: After the database was away every replica comes back in its own time.
RETRY_S = 0.1

_REGISTER = "INSERT INTO {replica} (key, address) VALUES (%s, %s)"
_LOCK = "SELECT pg_advisory_lock(hashtext({schema} || ' live'), %s)"
_BEAT = "UPDATE {replica} SET beat = beat + 1 WHERE key = %s"
_WATCH = """
    SELECT key, beat, pg_try_advisory_xact_lock_shared(hashtext({schema} || ' live'), key::int)
    FROM (SELECT key, beat FROM {replica} WHERE key <> %(me)s ORDER BY key < %(me)s, key LIMIT 2)
    AS neighbour
"""
#: The server may not have noticed yet that an earlier connection of this replica has ended.
_END_EARLIER = """
    SELECT pg_terminate_backend(pid) FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'
        AND classid = hashtext({schema} || ' live')::oid AND objid = %s::int::oid
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND pid <> pg_backend_pid()
"""


class Presence:
    """``key`` is this replica's. The three listeners are called in a thread of its own.

    ``hear`` gets what others tell this replica, ``reclaim`` the key of one that is dead,
    again and again until it is gone, ``left`` that of one that is no longer a neighbour.
    Raises errors of psycopg's.
    """

    def __init__(self, url: str, schema: str, address: str, lease_s: float) -> None:
        self.hear: Callable[[str], None] = lambda message: None
        self.reclaim: Callable[[int], None] = lambda key: None
        self.left: Callable[[int], None] = lambda key: None
        self._url, self._schema, self._lease_s = url, schema, lease_s
        self._closed = threading.Event()
        self._beats: dict[int, tuple[int, float]] = {}
        self._free_since: dict[int, float] = {}
        self._beaten_s = 0.0
        self._beat, self._watch = self._text(_BEAT), self._text(_WATCH)
        connection = self._connect()
        next_key = self._text("SELECT nextval({sequence})")
        self.key = int(connection.execute(next_key).fetchall()[0][0])
        self._enter(connection)
        connection.execute(self._text(_REGISTER), (self.key, address))
        self._first = connection
        self._thread = threading.Thread(
            target=self._run, args=(connection,), name="presence", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Returns when the lock is free, or soon after where the database hangs."""
        self._closed.set()
        if self._thread.ident is None:
            self._first.close()
        else:
            self._thread.join(1.0)

    # The thread

    def _run(self, connection: psycopg.Connection[Any] | None) -> None:
        is_lost = False
        while not self._closed.is_set():
            try:
                if connection is None:
                    connection = self._connect()
                    self._enter(connection)
                self._turn(connection)
                is_lost = False
            except psycopg.Error as error:
                if connection is not None:
                    connection.close()
                connection = None
                self._forget_others()
                if is_lost:  # the first time it is tried again at once
                    self._closed.wait(RETRY_S)
                else:
                    logger.warning("the shared store is unreachable: %s", str(error).strip())
                is_lost = True
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    def _connect(self) -> psycopg.Connection[Any]:
        return connect(self._url, timed=False)

    def _enter(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute(self._text(_END_EARLIER), (self.key,))
        connection.execute(self._text(_LOCK), (self.key,))
        channel = sql.Identifier(channel_name(self._schema, self.key))
        connection.execute(sql.SQL("LISTEN {}").format(channel))

    def _turn(self, connection: psycopg.Connection[Any]) -> None:
        began_s = time.monotonic()
        for notice in connection.notifies(timeout=WATCH_S):
            self.hear(notice.payload)
            if self._closed.is_set():
                return
        now = time.monotonic()
        if now - self._beaten_s >= self._lease_s / 5:
            self._beaten_s = now
            connection.execute(self._beat, (self.key,))
        self._look(connection, now)
        if time.monotonic() - began_s > self._lease_s / 2:
            self._forget_others()  # the database hung for all, or this process for itself

    def _look(self, connection: psycopg.Connection[Any], now: float) -> None:
        seen = connection.execute(self._watch, {"me": self.key}).fetchall()
        for key in self._beats.keys() - {key for key, _, _ in seen}:
            del self._beats[key]
            self._free_since.pop(key, None)
            self.left(key)  # or another neighbour has come in between
        for key, beat, is_free in seen:
            if self._is_dead(key, beat, is_free, now):
                self.reclaim(key)

    def _is_dead(self, key: int, beat: int, is_free: bool, now: float) -> bool:
        if self._beats.get(key, (None, 0.0))[0] != beat:
            self._beats[key] = beat, now
        if not is_free:
            self._free_since.pop(key, None)
        elif now - self._free_since.setdefault(key, now) >= GRACE_S:
            return True
        return now - self._beats[key][1] >= self._lease_s

    def _forget_others(self) -> None:
        """What was seen before the database was away, or hung, says nothing of now.

        A lock must then be free for a whole lease: its owner may still be on its way.
        """
        later = time.monotonic() + self._lease_s - GRACE_S
        self._free_since = dict.fromkeys(self._beats, later)
        self._beats = {}

    def _text(self, statement: LiteralString) -> sql.Composed:
        return sql.SQL(statement).format(
            schema=sql.Literal(self._schema),
            replica=sql.Identifier(self._schema, "replica"),
            sequence=sql.Literal(f'"{self._schema}".replica_key'),
        )


def channel_name(schema: str, key: int) -> str:
    """The name that a notice is sent to."""
    return f"{schema} {key}"
