"""A store's connection to its directory, and all that is known through it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from server.store.base import Identity
from server.store.errors import Fenced, StoreFailed, brief
from server.store.files import Files
from server.store.log import Log
from server.store.redo import Wanted, everyone, recover, without_refused
from server.store.saving import StoreClock
from server.store.snapshots import Snapshots, Unsaved
from server.store.sqlite.database import FILE_NAME, REFUSALS, SqliteDatabase
from server.store.sqlite.state_files import (
    DIR_NAME,
    FOREIGN_STATES,
    StateFiles,
    foreign_states,
    has_states,
)
from server.store.tables import Tables

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
            self._file = place.path / FILE_NAME
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
    file, log = path / FILE_NAME, path / f"{FILE_NAME}-wal"
    if file.exists() and file.stat().st_size:
        return
    if has_states(path / DIR_NAME) or (log.exists() and log.stat().st_size):
        raise StoreFailed(FOREIGN_STATES, detail=foreign_states(path))
