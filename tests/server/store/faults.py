"""A disk that fails: the same count runs through SQLite's files and through those of states."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import apsw

from server.store.base import Chunk, DiskFiles


class Faults:
    """Counts what is asked of the disk, and fails number ``at``, or all from there on."""

    def __init__(self, at: int = 0, code: int = errno.EIO, lasting: bool = False) -> None:
        self.at, self.code, self.lasting = at, code, lasting
        self.count = 0
        self.failed = False

    def heal(self) -> None:
        """From now on everything works."""
        self.at = 0

    def hit(self) -> bool:
        self.count += 1
        is_hit = bool(self.at) and (
            self.count >= self.at if self.lasting else self.count == self.at
        )
        self.failed = self.failed or is_hit
        return is_hit

    def check_file(self) -> None:
        if self.hit():
            raise OSError(self.code, os.strerror(self.code))

    def check_sqlite(self, error: type[apsw.Error]) -> None:
        if self.hit():
            raise apsw.FullError("full") if self.code == errno.ENOSPC else error("failed")


class FaultyFiles(DiskFiles):
    """Writes are torn: half of the file is there when one fails. Before each unlink, a call."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.on_unlink: Callable[[], object] = lambda: None

    def write(self, path: Path, chunks: Sequence[Chunk]) -> None:
        data = b"".join(chunks)
        super().write(path, [data[: len(data) // 2]])
        self.faults.check_file()
        super().write(path, [data])

    def allocate(self, path: Path, num_bytes: int) -> None:
        super().allocate(path, num_bytes // 2)
        self.faults.check_file()
        super().allocate(path, num_bytes)

    def sync(self, path: Path) -> None:
        self.faults.check_file()
        super().sync(path)

    def rename(self, path: Path, to: Path) -> None:
        self.faults.check_file()
        super().rename(path, to)

    def sync_dir(self, path: Path) -> None:
        self.faults.check_file()
        super().sync_dir(path)

    def unlink(self, path: Path) -> None:
        self.on_unlink()
        self.faults.check_file()
        super().unlink(path)

    def read(self, path: Path) -> bytes:
        self.faults.check_file()
        return super().read(path)


class FaultyVfs(apsw.VFS):
    """SQLite's own file system, with faults; registered under ``name`` while it lives."""

    def __init__(self, faults: Faults) -> None:
        self.name = f"faulty-{secrets.token_hex(4)}"
        self._faults = faults
        super().__init__(self.name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return FaultyFile(self._faults, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        self._faults.check_sqlite(apsw.IOError)
        super().xDelete(filename, syncdir)

    def excepthook(self, *_: object) -> bool:
        """SQLite continues after some errors, which is its right; pytest need not hear of it."""
        return True


class FaultyFile(apsw.VFSFile):
    """One file; a failing write leaves half of its bytes, a failing sync all of them."""

    def __init__(
        self, faults: Faults, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> None:
        self._faults = faults
        super().__init__("", name, flags)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        if self._faults.at and self._faults.count + 1 == self._faults.at:
            super().xWrite(data[: len(data) // 2], offset)
        self._faults.check_sqlite(apsw.IOError)
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._faults.check_sqlite(apsw.IOError)
        super().xSync(flags)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._faults.check_sqlite(apsw.IOError)
        super().xTruncate(newsize)

    def excepthook(self, *_: object) -> bool:
        """See `FaultyVfs.excepthook`."""
        return True
