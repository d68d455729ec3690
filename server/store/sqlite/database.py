"""The SQLite database of a store: its tables, its lock, its key, its reserve and its upkeep."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw

from server.engine.session import Deleted
from server.store.base import (
    NO_ROOM,
    Fenced,
    Files,
    RecordRefused,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreInUse,
    make_private,
)
from server.store.codec import UNSTORABLE
from server.store.rows import FOURTH, SECOND, TABLES, THIRD, refuse_unknown
from server.store.table_store import Connected, Saving, StoreClock, StoreLimits

# -------------------------------------------------------------------------------------------------
# Room on the disk that a store keeps for itself: given up where it must write on a full disk.
#
# Others may fill the volume to the last byte. To delete sessions, and to open at all, the
# store needs a little room; a file of zeros keeps it, and goes when there is no other.
# While it is gone, nothing but deletions is written, so that they do not run out of it.


logger = logging.getLogger(__name__)

RESERVE_FILE = "reserve"
RESERVE_BYTES = 2 << 20
#: Of a small volume, only so much is kept.
MAX_SHARE = 16

FULL = "the disk of the session store is full; try again later"


class Reserve:
    """The file in the store's folder ``path``. ``is_whole``: there is as much as there should be.

    Raises `OSError`.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self._file, self._files = path / RESERVE_FILE, files
        self.is_whole = True

    def check(self) -> None:
        """Raises `StoreFull` while it has been given up and there is no room for it."""
        if not self.is_whole:
            self.restore()
        if not self.is_whole:
            raise StoreFull(FULL)

    def give_up(self) -> bool:
        """Gives its room to the store; False if there was none."""
        self.is_whole = False
        try:
            self._files.unlink(self._file)
        except OSError:
            return False
        logger.warning("the disk is full: the session store has released its reserve")
        return True

    def restore(self) -> None:
        """Makes it again, if there is room for twice as much."""
        volume = os.statvfs(self._file.parent)
        num_bytes = min(RESERVE_BYTES, volume.f_blocks * volume.f_frsize // MAX_SHARE)
        try:
            if self._file.stat().st_size >= num_bytes:
                self.is_whole = True
                return
        except FileNotFoundError:
            pass
        self.is_whole = False
        if volume.f_bavail * volume.f_frsize >= 2 * num_bytes:
            self._make(num_bytes)

    def _make(self, num_bytes: int) -> None:
        try:
            self._files.allocate(self._file, num_bytes)
        except OSError as error:
            self._file.unlink(missing_ok=True)
            if error.errno not in NO_ROOM:
                raise
        else:
            self.is_whole = True


# -------------------------------------------------------------------------------------------------
# The SQLite database of a store: its tables, how it is opened, and what its failures mean.
#
# In WAL mode. A transaction that must outlast a power cut is synced; one that can
# be done over from the journal is not, and becomes durable with the next.


_TYPES = {
    "integer": "INTEGER",
    "text": "TEXT",
    "real": "REAL",
    "blob": "BLOB",
    "row_key": "INTEGER PRIMARY KEY",
    "session_key": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "end": " STRICT",
    "end_by_key": " STRICT, WITHOUT ROWID",
}

#: ``MIGRATIONS[i]`` leads from format i to format i + 1. Those of a release never change.
MIGRATIONS: tuple[str, ...] = (
    f"""
    CREATE TABLE meta (name TEXT PRIMARY KEY, value ANY) STRICT, WITHOUT ROWID;

    -- One row for each commit: what has not reached the other tables yet, and the keys of its
    -- sessions.
    CREATE TABLE journal (id INTEGER PRIMARY KEY, data BLOB NOT NULL, keys TEXT NOT NULL) STRICT;
    {TABLES.format(**_TYPES)}
    """,
    SECOND,
    THIRD,
    FOURTH,
)


def migrate(connection: apsw.Connection) -> None:
    """Brings the tables to this version, each step whole or not at all. Raises `StoreTooNew`."""
    version = format_of(connection)
    for number, step in enumerate(MIGRATIONS[version:], version + 1):
        with connection:
            connection.execute(step)
            connection.pragma("user_version", number)


def format_of(connection: apsw.Connection) -> int:
    """The format of the tables; 0 where there are none. Raises `StoreTooNew`."""
    version = int(connection.pragma("user_version"))
    refuse_unknown(version, len(MIGRATIONS), "the store", "directory")
    return version


DATABASE_FILE = "sessions.sqlite3"


class SqliteDatabase:
    """One connection, with the fence that its owner holds; in memory where there is no ``path``."""

    def __init__(self, path: Path | None, vfs: str | None, is_full: bool) -> None:
        self.num_wal_pages = 0
        self.fence = 0
        name = ":memory:" if path is None else str(_private(path))
        self._connection = connection = apsw.Connection(name, vfs=vfs)
        self.execute = connection.execute
        self._sync = "FULL" if is_full else "NORMAL"
        try:
            connection.set_busy_timeout(5000)  # first: whatever follows may wait for a lock
            connection.pragma("auto_vacuum", "INCREMENTAL")
            connection.pragma("temp_store", "MEMORY")
            if path is not None:
                self._write_ahead()
            migrate(connection)
        except BaseException:
            self.abandon()
            raise

    def _write_ahead(self) -> None:
        connection = self._connection
        if connection.pragma("journal_mode", "WAL") != "wal":
            raise StoreFailed("the file system of the session store has no shared memory")
        connection.pragma("synchronous", self._sync)
        connection.pragma("journal_size_limit", 64 << 20)
        connection.set_wal_hook(self._note_wal)

    @contextmanager
    def transaction(self, synced: bool = True) -> Iterator[None]:
        """All of it or nothing. Raises `Fenced` where another process has raised the fence."""
        is_lazy = self._sync == "FULL" and not synced
        if is_lazy:
            self.execute("PRAGMA synchronous = NORMAL")
        try:
            self.execute("BEGIN IMMEDIATE")
            self.check_fence()
            yield
            self.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self.execute("ROLLBACK")
            raise
        finally:
            if is_lazy:
                self.execute("PRAGMA synchronous = FULL")

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A part of a transaction of the caller's: all of it or nothing."""
        self.execute("SAVEPOINT part")
        try:
            yield
        except BaseException:
            if self._connection.in_transaction:
                self.execute("ROLLBACK TO part")
                self.execute("RELEASE part")
            raise
        self.execute("RELEASE part")

    def check_fence(self) -> None:
        """Raises `Fenced`."""
        if self.fence and self.meta("fence") != self.fence:
            raise Fenced("another process has taken this store over")

    def meta(self, name: str) -> Any:
        """A value that the store remembers, or None."""
        for (value,) in self.execute("SELECT value FROM meta WHERE name = ?", (name,)):
            return value
        return None

    def set_meta(self, name: str, value: object) -> None:
        """Has the store remember ``value``."""
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def checkpoint(self, truncate: bool = False) -> None:
        """Brings the write-ahead log into the database file."""
        mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if truncate else apsw.SQLITE_CHECKPOINT_PASSIVE
        with suppress(apsw.BusyError):  # a reader still needs the log: it stays a while
            self._connection.wal_checkpoint(mode=mode)
        self.num_wal_pages = 0

    def vacuum(self, num_pages: int) -> None:
        """Gives free pages back to the file system."""
        self.execute(f"PRAGMA incremental_vacuum({num_pages:d})").fetchall()

    def pragma(self, name: str) -> Any:
        """The value of a setting or counter of SQLite's."""
        return self._connection.pragma(name)

    def close(self) -> None:
        """After the last transaction; SQLite brings its log into the database."""
        self._connection.close()

    def abandon(self) -> None:
        """After a failure: nothing is tried again with what this connection knows."""
        with suppress(apsw.Error):  # it may be closed already
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self._connection.close(True)

    def _note_wal(self, _: apsw.Connection, __: str, num_pages: int) -> int:
        self.num_wal_pages = num_pages
        return apsw.SQLITE_OK


def _private(path: Path) -> Path:
    """The file of the database in ``path``; SQLite gives its other files the rights of that."""
    for file in (path / DATABASE_FILE, *path.glob(f"{DATABASE_FILE}-*")):
        make_private(file)
    return path / DATABASE_FILE


#: What the statements were about is at fault, and not the database: others are done.
REFUSALS = (*UNSTORABLE, apsw.ConstraintError, apsw.MismatchError, apsw.TooBigError)
#: All that can go wrong on a connection.
ERRORS = (apsw.Error, OSError, *REFUSALS)


def failure(error: Exception) -> StoreError:
    """What an error of SQLite or of the file system means."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, REFUSALS):
        return RecordRefused(error)
    if isinstance(error, apsw.FullError) or getattr(error, "errno", None) in NO_ROOM:
        return StoreFull(FULL)
    if isinstance(error, apsw.BusyError):
        return StoreFailed("the session store failed: another process has locked its database")
    return StoreFailed("the session store failed", detail=str(error))


@contextmanager
def errors_of_sqlite() -> Iterator[None]:
    """Errors of SQLite as those of a store."""
    try:
        yield
    except apsw.Error as error:
        raise failure(error) from error


# -------------------------------------------------------------------------------------------------
# One process owns a store. No clock of one process is compared with that of another.
#
# The owner holds a lock on the file ``lock``, which dies with it, and changes the
# file's content now and then. A process that finds the lock held and the content still
# for a whole lease takes the store over: the owner is stopped, and the fence in
# the database keeps it out when it wakes. An owner that was stopped in the middle of a
# commit holds a lock of SQLite's as well, which cannot be taken from it.


@dataclass(frozen=True)
class Waiting:
    """How long a lease is, and how to wait for its end."""

    lease_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Lock:
    """The right to open the store at ``path``; raises `StoreInUse`, perhaps after a lease."""

    def __init__(self, path: Path, waiting: Waiting) -> None:
        self._path, self._store, self._num_beats = path / "lock", path, 0
        self._stopped = b""
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._acquire(waiting)
            self.beat()
        except BaseException:
            os.close(self._file)
            raise

    @property
    def is_ours(self) -> bool:
        """False where the file has been removed or replaced."""
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:
            return False

    def beat(self) -> None:
        """Shows others that this process is alive, and takes the lock of one that has ended."""
        self._try()
        self._num_beats += 1
        os.pwrite(self._file, f"{os.getpid():<12}{self._num_beats:<20}\n".encode(), 0)

    def in_commit(self) -> StoreInUse | None:
        """Why the database is locked, where its owner was taken for stopped: it keeps the store."""
        if not self._stopped or self._try():
            return None
        os.pwrite(self._file, self._stopped, 0)
        pid = _pid(self._stopped)
        state = "is stopped" if _is_stopped(pid) else "does not move"
        return StoreInUse(
            f"process {pid} has the store {self._store}, {state} and has not ended a commit, "
            f"so that it cannot be taken over. Let the process continue (kill -CONT {pid}) or end "
            f"it (kill -KILL {pid}); then start again"
        )

    def close(self) -> None:
        """Releases the store: another process may open it at once."""
        os.close(self._file)

    def _acquire(self, waiting: Waiting) -> None:
        seen, until = self._content(), waiting.clock() + waiting.lease_s
        while not self._try():
            content = self._content()
            if content != seen:
                raise StoreInUse(
                    f"process {_pid(content)} has the store {self._store}; "
                    "stop it first, or name another folder"
                )
            if waiting.clock() >= until:
                self._stopped = content
                return
            waiting.sleep(waiting.lease_s / 20)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _content(self) -> bytes:
        return os.pread(self._file, 64, 0)


def owner(path: Path) -> str | None:
    """The process that has the store at ``path``, if there is one."""
    try:
        file = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid(os.pread(file, 64, 0))
    finally:
        os.close(file)
    return None


def _pid(content: bytes) -> str:
    return content[:12].decode(errors="replace").strip()


def _is_stopped(pid: str) -> bool:
    """Whether the process is known to be; only Linux says so, and only of its own processes."""
    try:
        status = Path(f"/proc/{int(pid)}/stat").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


# -------------------------------------------------------------------------------------------------
# The key that vouches for exported sessions: made once, and kept with the store.


KEY_FILE = "signing.key"
_KEY_BYTES = 32


def signing_key(store: Path) -> bytes:
    """The key of the store in a directory, made if there is none. Raises `OSError`, `StoreFailed`.

    Only one process may ask at a time.
    """
    path = store / KEY_FILE
    if not path.exists():
        _make(path)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise StoreFailed(f"{path} is not a key of {_KEY_BYTES} bytes")
    return key


def _make(path: Path) -> None:
    """Whole or not at all, and never readable by others."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    _write(new, secrets.token_bytes(_KEY_BYTES))
    new.rename(path)


def _write(path: Path, key: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(descriptor)


def is_key(path: Path) -> bool:
    """Whether the store in a directory has a key that can be used."""
    try:
        return len((path / KEY_FILE).read_bytes()) == _KEY_BYTES
    except OSError:
        return False


def copy_key(store: Path, new: Path) -> bool:
    """Gives another directory the key of ``store``; False where there is none that can be used."""
    if not is_key(store):
        return False
    _write(new / KEY_FILE, (store / KEY_FILE).read_bytes())
    return True


# -------------------------------------------------------------------------------------------------
# What a store does about once a second, besides what it is asked: saving, thinning, expiring.


#: State files written at a time, so that commits do not wait long. With more of them to write
#: the next turn comes soon: see `server.runtime.threads.SOON_S`.
SAVES_AT_ONCE = 8
EXPIRED_AT_ONCE = 100
CHECKPOINT_PAGES = 500
VACUUM_PAGES = 500


class Upkeep(Saving):
    """One round of it, on one connection. An error leaves the connection useless."""

    def __init__(
        self,
        connection: Connected,
        database: SqliteDatabase,
        clock: StoreClock,
        limits: StoreLimits,
    ) -> None:
        super().__init__(connection, clock, limits)
        self._database = database

    def run(self, touched: Iterable[int]) -> None:
        """Everything; ``touched`` are the keys of sessions that have been used."""
        saves = self._connection.unsaved.oldest(SAVES_AT_ONCE)
        if saves or touched or self._is_due():
            self._write(saves, touched)
        self._expire()
        if self._database.num_wal_pages >= CHECKPOINT_PAGES:
            self._database.checkpoint()
        if self._database.pragma("freelist_count") * 4 > self._database.pragma("page_count"):
            self._database.vacuum(VACUUM_PAGES)
        self._forget_idle()

    def compact(self) -> None:
        """All that `run` does bit by bit, at once and for every session."""
        while self._expire():
            pass
        ids = self._database.execute("SELECT id FROM session").fetchall()
        heads = (self._log.head(str(id)) for (id,) in ids)
        self._log.changed = {head for head in heads if head is not None}
        self.finish()
        self._database.vacuum(0)
        self._database.checkpoint(truncate=True)

    def finish(self) -> None:
        """Everything that would make the next start slower."""
        log = self._log
        with self._database.transaction():
            log.store_tails(
                [h for h in log.heads.values() if h.tail], log.last_row, self._clock.now_s
            )
        self.save()

    @property
    def is_over(self) -> bool:
        """Whether the store has more bytes than it may."""
        if self._limits.max_bytes is None:
            return False
        used = self._database.pragma("page_count") - self._database.pragma("freelist_count")
        num_bytes = used * self._database.pragma("page_size") + self._snapshots.num_bytes()
        return bool(num_bytes > self._limits.max_bytes)

    def _expire(self) -> bool:
        """Deletes what was unused for long, as a commit of its own; whether there was any."""
        if self._limits.retention_s is None:
            return False
        before_s = self._clock.now_s - self._limits.retention_s
        due = self._tables.unused_since(before_s, EXPIRED_AT_ONCE)
        heads = self._log.heads
        free = [id for id in due if id not in heads or not heads[id].is_held]
        if free:
            steps = self._log.append([(id, Deleted()) for id in free])
            self._log.settle(steps, self._clock.now_s)
        return bool(free)

    def _forget_idle(self) -> None:
        """Heads that the tables know as well are read again when they are needed."""
        log, unsaved = self._log, self._connection.unsaved
        for head in list(log.heads.values()):
            if not (head.is_held or head.tail or head in log.changed or unsaved.get(head.id)):
                del log.heads[head.id]
