"""One process owns a store. No clock of one process is compared with that of another.

The owner holds a lock on the file ``lock``, which dies with it, and changes the
file's content now and then. A process that finds the lock held and the content still
for a whole lease takes the store over: the owner is stopped, and the fence in
the database keeps it out when it wakes. An owner that was stopped in the middle of a
commit holds a lock of SQLite's as well, which cannot be taken from it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server.store.errors import StoreInUse


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
