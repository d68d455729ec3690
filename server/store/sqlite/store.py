"""The store of one machine: an SQLite database and files of states in one directory.

After an error of the disk the connection is given up, and the next call recovers
from what is on the disk, as a new process would.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import apsw

from server.engine.value import Deleted, Record
from server.store.base import Identity
from server.store.errors import Fenced, RecordRefused, StoreError, StoreFailed, StoreFull
from server.store.files import Chunk, DiskFiles, Files
from server.store.saving import MAX_UNSAVED_BYTES, OVER, SAVED_AT_ONCE, Durability, StoreLimits
from server.store.snapshots import Unsaved
from server.store.sqlite.connection import Connection, Known, StoreLocation
from server.store.sqlite.database import ERRORS, REFUSALS, failure
from server.store.sqlite.lock import Lock, Waiting
from server.store.sqlite.named_files import NamedFiles
from server.store.sqlite.reserve import Reserve
from server.store.sqlite.signing import signing_key
from server.store.sqlite.state_files import DIR_NAME
from server.store.sqlite.upkeep import Upkeep
from server.store.table_store import LocalStore

logger = logging.getLogger(__name__)


def open_store(
    path: Path,
    identity: Identity,
    durability: Durability = "full",
    *,
    limits: StoreLimits | None = None,
    waiting: Waiting | None = None,
    files: Files | None = None,
    vfs: str | None = None,
) -> SqliteStore:
    """Opens the store at ``path``, or makes one; `SqliteStore.close` is the caller's duty.

    With ``relaxed`` durability a commit outlasts the process, but perhaps not a
    power cut. Raises `StoreInUse`, perhaps after a lease, `StoreTooNew`,
    `StoreFull` or `StoreFailed`.
    """
    place = StoreLocation(path, identity, durability == "full", files or DiskFiles(), vfs)
    return SqliteStore(place, limits or StoreLimits(), waiting or Waiting())


class SqliteStore(LocalStore):
    """See `server.store.base.Store` for what is public, and `open_store` to open one."""

    durable = True

    def __init__(self, place: StoreLocation, limits: StoreLimits, waiting: Waiting) -> None:
        super().__init__()
        self.store_id = ""
        self._place, self._limits, self._waiting = place, limits, waiting
        self._unsaved = Unsaved()
        self._lock: Lock | None = None
        self._connection: Connection | None = None
        self._known: Known | None = None
        self._end: StoreError | None = None
        self._is_over = self._skips_refused = False
        self._reserve = Reserve(place.path, place.files)
        self._named = NamedFiles(place.path, place.files, place.is_full)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        try:
            with self._connected():
                self._reserve.restore()
        except StoreFull:
            if not self._reserve.give_up():
                raise
            with self._connected():
                pass

    # What a store does

    def commit(self, records: Sequence[Record]) -> None:
        is_more = not all(isinstance(entry, Deleted) for _, entry in records)
        try:
            self._commit(records, is_more)
        except StoreFull:
            if is_more or not self._reserve.give_up():
                raise
            self._commit(records, is_more)

    def _commit(self, records: Sequence[Record], is_more: bool) -> None:
        """Records that need room, where there ``is_more`` than deletions, wait for the reserve."""
        with self._connected(is_write=True) as connection:
            if is_more and self._is_over:
                raise StoreFull(OVER)
            if is_more:
                self._reserve.check()
            try:
                steps = connection.log.append(records)
            except (apsw.FullError, OSError, *REFUSALS) as error:
                if not isinstance(failure(error), StoreFull | RecordRefused):
                    raise
                raise failure(error) from error  # nothing has changed: the connection is good
            try:
                connection.log.settle(steps, self._clock.now_s)
                if self._unsaved.num_bytes > MAX_UNSAVED_BYTES:
                    self._upkeep(connection).save(SAVED_AT_ONCE)
            except Exception as error:
                # The commit is on the disk, and what follows from it is found there again.
                logger.exception("the session store failed after a commit; recovering")
                self._skips_refused = isinstance(error, REFUSALS)
                self._abandon()

    def named_states(self) -> dict[str, str]:
        with self._connected():
            return self._named.digests()

    def read_named(self, name: str) -> bytes | None:
        with self._connected():
            return self._named.read(name)

    def put_named(self, name: str, digest: str, parts: Sequence[Chunk]) -> None:
        with self._connected(is_write=True) as connection:
            connection.database.check_fence()
            self._reserve.check()
            self._named.put(name, digest, parts)

    def drop_named(self, name: str) -> bool:
        with self._connected(is_write=True) as connection:
            connection.database.check_fence()
            return self._named.remove(name)

    def maintain(self, now_s: float) -> bool:
        self._clock.advance(now_s)
        try:
            self._round()
        except RecordRefused:  # the next connection begins by putting that into quarantine
            self._round()
        if self._is_over:
            raise StoreFull(OVER)
        return bool(self._unsaved.oldest(1))

    def _round(self) -> None:
        with self._connected(is_write=True) as connection:
            connection.database.check_fence()
            if self._lock is not None:
                self._lock.beat()
            upkeep = self._upkeep(connection)
            upkeep.run(self._touched)
            self._touched = set()
            self._is_over = upkeep.is_over
            self._reserve.restore()
            self._reserve.check()

    def compact(self) -> None:
        """Drops all that need not be kept, and gives the room back to the file system."""
        with self._connected(is_write=True) as connection:
            self._upkeep(connection).compact()

    def forget(self) -> None:
        """See `server.store.base.Store.forget`: what is here stays."""

    def close(self) -> None:
        """See `server.store.base.Store.close`. An error is logged: what counts is on the disk."""
        if self._connection is not None:
            try:
                self._upkeep(self._connection).finish()
                self._connection.database.close()
            except (*ERRORS, Fenced) as error:
                logger.warning("the session store could not be closed cleanly: %s", error)
                self._abandon()
            self._connection = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._end = self._end or StoreError("the session store is closed")

    # The connection

    @contextmanager
    def _connected(self, is_write: bool = False) -> Iterator[Connection]:
        """The connection, another one if need be; its errors as those of a store."""
        if self._end is not None:
            raise type(self._end)(self._end.message)
        try:
            if is_write and self._connection is not None and not self._connection.is_in_place:
                self._abandon()
            yield self._connection or self._connect()
        except Fenced as error:
            self._end = error
            self._abandon()
            raise
        except ERRORS as error:
            self._abandon()
            self._skips_refused = self._skips_refused or isinstance(error, REFUSALS)
            raise failure(error) from error

    def _connect(self) -> Connection:
        path = self._place.path
        if path.is_file():
            raise StoreFailed(f"{path} is a file, and a store is a folder: give another path")
        if (
            self._known is None
        ):  # later a folder that is gone may come back: nothing takes its place
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / DIR_NAME).mkdir(mode=0o700, exist_ok=True)
        if self._place.is_full:
            self._place.files.sync_dir(path.parent)
        if self._lock is not None and not self._lock.is_ours:
            self._lock.close()
            self._lock = None
        if self._lock is None:
            self._lock = Lock(path, self._waiting)
        signing_key(path)  # there from the first day, for exports
        try:
            self._connection = Connection(
                self._place, self._known, self._clock, self._unsaved, self._skips_refused
            )
        except apsw.BusyError as error:
            raise self._lock.in_commit() or failure(error) from error
        self._skips_refused = False
        self.store_id = self._connection.store_id
        return self._connection

    def _abandon(self) -> None:
        """Gives up a connection that may have been wrong about the disk."""
        if self._connection is not None:
            self._known = self._connection.known()
            self._connection.database.abandon()
            self._connection = None

    def _upkeep(self, connection: Connection) -> Upkeep:
        return Upkeep(connection, connection.database, self._clock, self._limits)
