"""Reads the lines of a growing file, which may be rotated or truncated.

It has no clock and does not wait: the caller polls for new lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

#: A longer line is split into pieces of this many bytes.
MAX_LINE_BYTES = 8192


@dataclass(frozen=True)
class Place:
    """``offset`` bytes into the file with ``inode``; the path had ``number`` other files before."""

    inode: int
    number: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Line:
    """One line without its newline. ``begin`` identifies it; the next line begins at ``end``."""

    data: bytes
    begin: Place
    end: Place


class Tail:
    """Follows the file at ``path`` from ``place``, or from its beginning.

    A renamed file is read to its end first, also if it was renamed while it was not
    followed, as long as it is still in the same folder.
    """

    def __init__(self, path: Path, place: Place | None = None) -> None:
        self._path = path
        self._place = place
        self._file: BinaryIO | None = None

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def lines(self) -> Iterator[Line]:
        """Yields the lines written so far."""
        while self._file is not None or self._open():
            yield from self._whole_lines()
            if not self._is_over():
                return
            yield from self._whole_lines()  # written between the last read and the rename
            yield from self._rest()
            self._begin_again()

    def _open(self) -> bool:
        """Opens the file of the place, or else the one at the path. False if there is none."""
        if self._place is None:
            return self._begin_again()
        for path in (self._path, *sorted(self._path.parent.iterdir())):
            if path.is_file() and path.stat().st_ino == self._place.inode:
                self._file = path.open("rb")
                return True
        return self._begin_again()

    def _begin_again(self) -> bool:
        self.close()
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            return False
        number = 0 if self._place is None else self._place.number + 1
        self._place = Place(os.fstat(self._file.fileno()).st_ino, number)
        return True

    def _is_over(self) -> bool:
        """Whether the path now has another file, or the file was truncated."""
        assert self._file is not None and self._place is not None
        if os.fstat(self._file.fileno()).st_size < self._place.offset:
            return True
        try:
            return self._path.stat().st_ino != self._place.inode
        except FileNotFoundError:
            return False

    def _whole_lines(self) -> Iterator[Line]:
        while block := self._block():
            lines = block.split(b"\n")
            if len(lines) == 1 and len(block) < MAX_LINE_BYTES:
                return
            for line in lines[:-1] or lines:
                yield self._advance(line, len(line) + (len(lines) > 1))

    def _rest(self) -> Iterator[Line]:
        if rest := self._block():
            yield self._advance(rest, len(rest))

    def _block(self) -> bytes:
        assert self._file is not None and self._place is not None
        self._file.seek(self._place.offset)
        return self._file.read(MAX_LINE_BYTES)

    def _advance(self, data: bytes, num_bytes: int) -> Line:
        assert self._place is not None
        begin = self._place
        self._place = replace(begin, offset=begin.offset + num_bytes)
        return Line(data, begin, self._place)
