"""The stores of one machine: an SQLite database and files of states in a folder, or in memory."""

from __future__ import annotations

import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw

from server.engine.session import Deleted, Record, StateBlock
from server.engine.types import TokenEvent
from server.store.base import (
    Chunk,
    DiskFiles,
    Fenced,
    Files,
    Identity,
    RecordRefused,
    StoreError,
    StoreFailed,
    StoreFull,
    brief,
)
from server.store.codec import UNSTORABLE
from server.store.log import Log, LoggedEntry, Wanted, everyone, pack_row, recover, without_refused
from server.store.rows import Head, Tables
from server.store.sqlite.database import (
    DATABASE_FILE,
    ERRORS,
    REFUSALS,
    Lock,
    Reserve,
    SqliteDatabase,
    Upkeep,
    Waiting,
    failure,
    signing_key,
)
from server.store.sqlite.files import (
    FOREIGN_STATES,
    SNAPSHOTS_DIR,
    NamedFiles,
    StateFiles,
    foreign_states,
    has_states,
)
from server.store.states import SnapshotRow, Snapshots, Unsaved
from server.store.table_store import (
    MAX_UNSAVED_BYTES,
    OVER,
    SAVED_AT_ONCE,
    Durability,
    LocalStore,
    StoreClock,
    StoreLimits,
)

# -------------------------------------------------------------------------------------------------
# A store's connection to its directory, and all that is known through it.


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreLocation:
    """Where a store is, and how it is written; with ``is_full`` a commit outlasts a power cut."""

    path: Path
    identity: Identity
    is_full: bool
    files: Files
    vfs: str | None


@dataclass(frozen=True)
class Known:
    """What an earlier connection of this process knew."""

    store_id: str
    fence: int
    last_row: int
    held: Iterable[str]


class Connection:
    """After an error another one is made, which knows only what is on the disk.

    Raises errors of SQLite and the file system, and `Fenced` where another process
    has had the store since ``known``. With ``skips_refused`` sessions whose data the database
    refuses are looked for.
    """

    def __init__(
        self,
        place: StoreLocation,
        known: Known | None,
        clock: StoreClock,
        unsaved: Unsaved,
        skips_refused: bool = False,
    ) -> None:
        refuse_lost_database(place.path)
        self.database = SqliteDatabase(place.path, place.vfs, place.is_full)
        try:
            states = StateFiles(place.path, place.files, place.identity, place.is_full)
            self.snapshots = Snapshots(self.database, place.identity, states)
            self.tables = Tables(self.database)
            self.unsaved = unsaved
            self._file = place.path / DATABASE_FILE
            self._stat = self._file.stat()
            self.log = self._recover(known, clock, states, skips_refused)
            states.remove_leftovers(self.snapshots.used())
        except BaseException:
            self.database.abandon()
            raise

    @property
    def is_in_place(self) -> bool:
        """False where the directory has been emptied or replaced."""
        try:
            return os.path.samestat(self._stat, self._file.stat())
        except OSError:
            return False

    def known(self) -> Known:
        """What the next connection should know."""
        held = [head.id for head in self.log.heads.values() if head.is_held]
        return Known(self.store_id, self.database.fence, self.log.last_row, held)

    def _recover(
        self, known: Known | None, clock: StoreClock, states: StateFiles, skips_refused: bool
    ) -> Log:
        self.database.checkpoint(truncate=True)
        with self.database.transaction():
            stored_id = self.database.meta("store_id")
            self.store_id = stored_id or secrets.token_hex(8)
            states.claim(self.store_id, is_new=stored_id is None)
            fence = self.database.meta("fence") or 0
            if known is not None and known.store_id == self.store_id:
                if fence != known.fence:
                    raise Fenced("another process has taken this store over")
            else:
                known = None
                fence += 1
                self.unsaved.clear()
                self.database.set_meta("store_id", self.store_id)
                self.database.set_meta("fence", fence)
                clock.set(self.database.meta("clock_s") or 0.0)
            self.snapshots.prepare()
            log = self._log(known, clock.now_s, skips_refused)
        self.database.fence = fence
        return log

    def _log(self, known: Known | None, now_s: float, skips_refused: bool) -> Log:
        """What the journal leads to."""
        last_row, held = (None, ()) if known is None else (known.last_row, known.held)

        def read(is_wanted: Wanted = everyone) -> Log:
            log = Log(self.database, self.tables, self.snapshots, self.unsaved)
            return recover(log, last_row, held, now_s, is_wanted)

        if not skips_refused:
            try:
                with self.database.savepoint():
                    return read()
            except REFUSALS as error:
                logger.error("the journal cannot be read in full: %s", brief(error))
        else:
            self.unsaved.clear()  # one of them may be at fault; sessions continue by a replay
        return without_refused(self.database, REFUSALS, read, now_s)


def refuse_lost_database(path: Path) -> None:
    """Raises `StoreFailed` where the database is missing or empty, and its other files are not.

    SQLite would begin a new one, and delete the write-ahead log of the old one.
    """
    file, log = path / DATABASE_FILE, path / f"{DATABASE_FILE}-wal"
    if file.exists() and file.stat().st_size:
        return
    if has_states(path / SNAPSHOTS_DIR) or (log.exists() and log.stat().st_size):
        raise StoreFailed(FOREIGN_STATES, detail=foreign_states(path))


# -------------------------------------------------------------------------------------------------
# After an error of the disk the connection is given up, and the next call recovers
# from what is on the disk, as a new process would.


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
        (path / SNAPSHOTS_DIR).mkdir(mode=0o700, exist_ok=True)
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


# -------------------------------------------------------------------------------------------------
# A store in this process's memory: bounded, and gone with the process.
#
# The tables are those of the store on disk, in a database in memory, and the states are objects.
# There is no journal: nothing can be lost that it would bring back.

MAX_KEYS = 100_000
#: Of states that no other process shall read.
NO_IDENTITY = Identity("", "", "", "", 0, "")
LIMITS = StoreLimits(max_log_tokens=65_536, max_snapshots=4)

_STATES = (
    "SELECT session, key, place, min_length, file, bytes FROM snapshot "
    "WHERE file NOTNULL ORDER BY key"
)
_NEWEST = "SELECT max(key) FROM snapshot GROUP BY session"
#: The keys in the order of their last use.
_KEY_USES = """
    CREATE TABLE key_use (number INTEGER PRIMARY KEY, owner, key, UNIQUE (owner, key));
    CREATE TRIGGER key_begun AFTER INSERT ON request_key BEGIN
        INSERT INTO key_use (owner, key) VALUES (new.owner, new.key);
    END;
    CREATE TRIGGER key_begun_again AFTER UPDATE OF request_id ON request_key BEGIN
        DELETE FROM key_use WHERE owner = new.owner AND key = new.key;
        INSERT INTO key_use (owner, key) VALUES (new.owner, new.key);
    END;
    CREATE TRIGGER key_gone AFTER DELETE ON request_key BEGIN
        DELETE FROM key_use WHERE owner = old.owner AND key = old.key;
    END;
"""
_DROP_KEYS = """
    DELETE FROM request_key WHERE (owner, key) IN (
        SELECT owner, key FROM key_use ORDER BY number
        LIMIT max(0, (SELECT count(*) FROM key_use) - ?)
    )
"""


class MemoryStates:
    """States as the objects that they are. See `server.store.states.States`."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._states: dict[str, StateBlock] = {}

    def write(self, states: Sequence[tuple[StateBlock, int]]) -> list[str]:
        new = {secrets.token_hex(16): state for state, _ in states}
        self._states |= new
        self.num_bytes += sum(map(self.size, new))
        return [*new]

    def read(self, name: str, position: int) -> StateBlock:
        return self._states[name]

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.num_bytes -= self.size(name)
            del self._states[name]

    def size(self, name: str) -> int:
        """Bytes of a state."""
        return self._states[name].num_bytes


class MemoryLog(Log):
    """Its newest entries are nowhere but in ``heads``."""

    def _add_row(self, steps: Sequence[LoggedEntry]) -> None:
        """Only tries what clients have written; a token can always be stored."""
        pack_row([step for step in steps if type(step[1]) is not TokenEvent])


class MemoryConnection:
    """What `server.store.sqlite.store.Connection` is, without a directory."""

    def __init__(self, identity: Identity) -> None:
        self.database = SqliteDatabase(None, None, is_full=False)
        self.database.execute(_KEY_USES)
        self.states, self.unsaved = MemoryStates(), Unsaved()
        self.tables = Tables(self.database)
        self.snapshots = Snapshots(self.database, identity, self.states)
        self.snapshots.prepare()
        self.log = MemoryLog(self.database, self.tables, self.snapshots, self.unsaved)


class MemoryUpkeep(Upkeep):
    """Where states need more than ``max_state_bytes``, the oldest go; so do more than ``max_keys``.

    The newest one of a session that has been evicted stays.
    """

    def __init__(
        self,
        connection: MemoryConnection,
        clock: StoreClock,
        limits: StoreLimits,
        max_state_bytes: int,
        max_keys: int,
    ) -> None:
        super().__init__(connection, connection.database, clock, limits)
        self._states, self._max_state_bytes = connection.states, max_state_bytes
        self._max_keys = max_keys

    def _shorten(self, heads: Sequence[Head]) -> None:
        super()._shorten(heads)
        if self._states.num_bytes > self._max_state_bytes:
            self._bound_states()
        self._database.execute(_DROP_KEYS, (self._max_keys,))

    def _bound_states(self) -> None:
        """Drops the oldest states, to an eighth below the bound, so that it is rarely done."""
        found: list[Any] = self._database.execute(_STATES).fetchall()
        uses = Counter(file for *_, file, _ in found)
        num_bytes = sum(map(self._states.size, uses))
        newest = {key for (key,) in self._database.execute(_NEWEST)}
        held = {head.key for head in self._log.heads.values() if head.is_held}
        for session, *columns in found:
            row = SnapshotRow(*columns)
            if num_bytes <= self._max_state_bytes * 7 // 8:
                break
            if row.file is None or (row.key in newest and session not in held):
                continue
            self._log.drop_snapshots(session, [row])
            uses[row.file] -= 1
            if not uses[row.file]:
                num_bytes -= self._states.size(row.file)

    def _needed_entry(self, head: Head, rows: Sequence[SnapshotRow]) -> int:
        """None that is stored: memory is bounded, whatever can be reached without it."""
        save = self._connection.unsaved.get(head.id)
        return head.num_stored if save is None else save.place


class MemoryStore(LocalStore):
    """See `server.store.base.Store` for what is public.

    ``max_state_bytes`` bounds the states of snapshots, ``max_keys`` the keys of requests; see
    `MemoryUpkeep`.
    """

    def __init__(
        self,
        identity: Identity = NO_IDENTITY,
        limits: StoreLimits = LIMITS,
        *,
        durable: bool = False,
        max_state_bytes: int = 256 << 20,
        max_keys: int = MAX_KEYS,
    ) -> None:
        super().__init__()
        self.store_id = secrets.token_hex(8)
        self.durable = durable
        self._connection = MemoryConnection(identity)
        self._upkeep = MemoryUpkeep(
            self._connection, self._clock, limits, max_state_bytes, max_keys
        )
        self._max_state_bytes = self._next_bound_bytes = max_state_bytes
        self._named: dict[str, tuple[str, bytes]] = {}

    @contextmanager
    def _connected(self) -> Iterator[MemoryConnection]:
        yield self._connection

    def commit(self, records: Sequence[Record]) -> None:
        connection = self._connection
        try:
            steps = connection.log.append(records)
        except UNSTORABLE as error:
            raise RecordRefused(error) from error
        connection.log.settle(steps, self._clock.now_s)
        if connection.unsaved.num_bytes + connection.states.num_bytes > self._next_bound_bytes:
            self._upkeep.save()
            num_bytes = connection.states.num_bytes
            self._next_bound_bytes = max(self._max_state_bytes, num_bytes + num_bytes // 8)

    def named_states(self) -> dict[str, str]:
        return {name: digest for name, (digest, _) in self._named.items()}

    def read_named(self, name: str) -> bytes | None:
        return self._named[name][1] if name in self._named else None

    def put_named(self, name: str, digest: str, parts: Sequence[Chunk]) -> None:
        self._named[name] = digest, b"".join(parts)

    def drop_named(self, name: str) -> bool:
        return self._named.pop(name, None) is not None

    def maintain(self, now_s: float) -> bool:
        self._clock.advance(now_s)
        self._upkeep.run(self._touched)
        self._touched = set()
        return bool(self._connection.unsaved.oldest(1))

    def forget(self) -> None:
        """See `server.store.base.Store.forget`: what is here stays."""

    def close(self) -> None:
        self._connection.database.close()
