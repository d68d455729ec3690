"""The few operations on files that a store needs, so that a test can let each of them fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

Chunk = bytes | memoryview

#: Errors of a disk, or of a quota, that has no room left.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Files(Protocol):
    """Each raises `OSError`."""

    def write(self, path: Path, chunks: Sequence[Chunk]) -> None:
        """A new file of ``chunks``, or a new content of an old one."""

    def allocate(self, path: Path, num_bytes: int) -> None:
        """A new file of zeros that takes up ``num_bytes`` of the disk."""

    def sync(self, path: Path) -> None:
        """What was written is on the disk when this returns."""

    def rename(self, path: Path, to: Path) -> None:
        """Atomic: an open of ``to`` sees the old file or the new one."""

    def sync_dir(self, path: Path) -> None:
        """The names in a directory are on the disk when this returns."""

    def unlink(self, path: Path) -> None:
        """Removes a file."""

    def read(self, path: Path) -> bytes:
        """The whole file. Raises `OSError` for a symbolic link too."""


class DiskFiles:
    """The file system itself."""

    def write(self, path: Path, chunks: Sequence[Chunk]) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(create(path), "wb", buffering=0) as file:
            for chunk in chunks:
                left = memoryview(chunk)
                while left:
                    left = left[file.write(left) :]

    def allocate(self, path: Path, num_bytes: int) -> None:
        with os.fdopen(create(path), "wb", buffering=0) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            else:
                file.write(bytes(num_bytes))

    def sync(self, path: Path) -> None:
        _sync(path, os.O_RDWR)

    def rename(self, path: Path, to: Path) -> None:
        path.rename(to)

    def sync_dir(self, path: Path) -> None:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def read(self, path: Path) -> bytes:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return file.read()


def replace(files: Files, path: Path, chunks: Sequence[Chunk], is_synced: bool) -> None:
    """Replaces a file atomically. The new name is durable when the folder has been synced."""
    new = path.with_suffix(".new")
    try:
        files.write(new, chunks)
        if is_synced:
            files.sync(new)
        files.rename(new, path)
    except BaseException:
        with suppress(OSError):  # it is found when leftovers are looked for
            files.unlink(new)
        raise


def create(path: Path) -> int:
    """A descriptor of an empty file that only its owner may read, whatever its folder allows."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def make_private(path: Path) -> None:
    """Makes the file if it is missing; takes the rights of others to it.

    An existing file is not opened: to close it would free the locks that SQLite holds in
    this process.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        with suppress(PermissionError):  # another user's file, which this one may use
            path.chmod(0o600)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
