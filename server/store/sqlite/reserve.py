"""Room on the disk that a store keeps for itself: given up where it must write on a full disk.

Others may fill the volume to the last byte. To delete sessions, and to open at all, the
store needs a little room; a file of zeros keeps it, and goes when there is no other.
While it is gone, nothing but deletions is written, so that they do not run out of it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from server.store.errors import StoreFull
from server.store.files import NO_ROOM, Files

logger = logging.getLogger(__name__)

FILE_NAME = "reserve"
RESERVE_BYTES = 2 << 20
#: Of a small volume, only so much is kept.
MAX_SHARE = 16

FULL = "the disk of the session store is full; try again later"


class Reserve:
    """The file in the store's folder ``path``. ``is_whole``: there is as much as there should be.

    Raises `OSError`.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self._file, self._files = path / FILE_NAME, files
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
