"""The few operations on files that a store needs, so that a test can let each of them fail."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

Chunk = bytes | memoryview


class Files(Protocol):
    """Each raises `OSError`."""

    def write(self, path: Path, chunks: Sequence[Chunk]) -> None:
        """A new file of ``chunks``, or a new content of an old one."""

    def sync(self, path: Path) -> None:
        """What was written is on the disk when this returns."""

    def rename(self, path: Path, to: Path) -> None:
        """At once: whoever opens ``to`` sees the old file or the new one."""

    def sync_dir(self, path: Path) -> None:
        """The names in a directory are on the disk when this returns."""

    def unlink(self, path: Path) -> None:
        """Removes a file."""

    def read(self, path: Path) -> bytes:
        """The whole file; a link is none."""


class DiskFiles:
    """The file system itself."""

    def write(self, path: Path, chunks: Sequence[Chunk]) -> None:
        """See `Files.write`."""
        path.parent.mkdir(exist_ok=True)
        with path.open("wb", buffering=0) as file:
            for chunk in chunks:
                left = memoryview(chunk)
                while left:
                    left = left[file.write(left) :]

    def sync(self, path: Path) -> None:
        """See `Files.sync`."""
        _sync(path, os.O_RDWR)

    def rename(self, path: Path, to: Path) -> None:
        """See `Files.rename`."""
        path.rename(to)

    def sync_dir(self, path: Path) -> None:
        """See `Files.sync_dir`."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def unlink(self, path: Path) -> None:
        """See `Files.unlink`."""
        path.unlink()

    def read(self, path: Path) -> bytes:
        """See `Files.read`."""
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return file.read()


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
