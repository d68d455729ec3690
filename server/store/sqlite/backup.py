"""A copy of a store that may be in use: its database as of one moment, and the states of then.

A state's file never changes. It is there before a row names it, and goes after the last row that
did. So most files are copied first; then a read transaction fixes the moment, and what it names
and is still missing is copied; then the database, page by page, as that transaction sees it. The
server writes all the while. A file that went in between belongs to a moment that is over: another
transaction is begun.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import apsw

from server.store.files import DiskFiles, create
from server.store.sqlite.database import FILE_NAME, errors_of_sqlite, format_of
from server.store.sqlite.named_files import DIR_NAME as NAMED_DIR
from server.store.sqlite.named_files import files_in
from server.store.sqlite.reader import open_for_reading
from server.store.sqlite.signing import FILE_NAME as KEY_NAME
from server.store.sqlite.state_files import DIR_NAME, OWNER_NAME

PAGES_AT_ONCE = 1000
#: Folders of a store that have no other store.
_LEAVES = {DIR_NAME, NAMED_DIR, "prefixes"}


class Backup(NamedTuple):
    """What was copied; ``lost`` are states that the database names and the store has not."""

    num_sessions: int
    num_states: int
    lost: list[str]


def stores_in(path: Path) -> list[Path]:
    """All stores of a server: that in ``path`` itself, those of named models and of versions."""
    found = []
    for folder, names, files in os.walk(path):
        names[:] = sorted(set(names) - _LEAVES)
        if FILE_NAME in files:
            found.append(Path(folder))
    return found


def back_up(path: Path, new: Path, note: Callable[[str], None] = lambda _: None) -> Backup:
    """Copies the store at ``path`` to the empty folder ``new``; `sync_tree` is the caller's duty.

    ``note`` gets lines that tell how far it is. Raises `OSError` and `StoreError`.
    """
    _refuse_links(path, Path(FILE_NAME))
    (new / DIR_NAME).mkdir(mode=0o700)
    copied: set[str] = set()

    def copy(files: Iterable[str]) -> set[str]:
        """Those that are not there."""
        gone = set()
        for file in files:
            if _is_copied(path, Path(DIR_NAME, file), new):
                copied.add(file)
                note(f"{len(copied)} states")
            else:
                gone.add(file)
        return gone

    with _moment(path) as source:
        early = _states(source)
    copy(sorted(early))
    gone: set[str] = set()
    while True:
        with _moment(path) as source:
            used, missed = _states(source), gone
            gone = copy(sorted(used - copied))
            if gone <= missed:  # a later moment still names them
                (num_sessions,) = source.execute("SELECT count(*) FROM session").fetchall()[0]
                _copy_database(source, new, note)
                break
    for file in copied - used:
        (new / DIR_NAME / file).unlink()
    for named in files_in(path):
        _is_copied(path, Path(NAMED_DIR, named.name), new)
    _is_copied(path, Path(KEY_NAME), new)
    return Backup(int(str(num_sessions)), len(used - gone), sorted(gone))


def sync_tree(path: Path) -> None:
    """All that is in a folder is on the disk when this returns."""
    files = DiskFiles()
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            files.sync(Path(folder) / name)
        files.sync_dir(Path(folder))


def renew_id(path: Path) -> str:
    """Makes the store at ``path`` another one; no server may have it. Returns its id.

    To clients its sessions then have another history: a cursor of before gets ``reset``.
    """
    store_id = secrets.token_hex(8)
    with errors_of_sqlite():
        connection = apsw.Connection(str(path / FILE_NAME), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            format_of(connection)
            # Without this file the states belong to the database, whichever id that has.
            (path / DIR_NAME / OWNER_NAME).unlink(missing_ok=True)
            DiskFiles().sync_dir(path / DIR_NAME)
            connection.execute("UPDATE meta SET value = ? WHERE name = 'store_id'", (store_id,))
        finally:
            connection.close(True)
    return store_id


@contextmanager
def _moment(path: Path) -> Iterator[apsw.Connection]:
    """The database as it is now, whatever is written meanwhile."""
    with open_for_reading(path) as connection:
        connection.execute("BEGIN")
        format_of(connection)  # the first statement that reads fixes the moment
        yield connection


def _states(source: apsw.Connection) -> set[str]:
    query = "SELECT DISTINCT file FROM snapshot WHERE file NOTNULL"
    return {str(file) for (file,) in source.execute(query)}


def _copy_database(source: apsw.Connection, new: Path, note: Callable[[str], None]) -> None:
    os.close(create(new / FILE_NAME))
    copy = apsw.Connection(str(new / FILE_NAME))
    try:
        with copy.backup("main", source, "main") as backup:
            while not backup.done:
                backup.step(PAGES_AT_ONCE)
                done = backup.page_count - backup.remaining
                note(f"{done} of {backup.page_count} pages of the database")
    finally:
        copy.close()
    for (store_id,) in source.execute("SELECT value FROM meta WHERE name = 'store_id'"):
        DiskFiles().write(new / DIR_NAME / OWNER_NAME, [str(store_id).encode()])


def _is_copied(path: Path, file: Path, new: Path) -> bool:
    """False where the store at ``path`` has no such file. Raises `OSError`, for links too."""
    _refuse_links(path, file)
    to = new / file
    try:
        with os.fdopen(os.open(path / file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as source:
            to.parent.mkdir(mode=0o700, exist_ok=True)
            with os.fdopen(create(to), "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except FileNotFoundError:
        return False
    return True


def _refuse_links(path: Path, file: Path) -> None:
    """Raises `OSError` where a part of ``file`` leads out of the store at ``path``.

    Who may write into a store may not read all that the user of this command may.
    """
    place = path
    for part in file.parts:
        place /= part
        if place.is_symlink() or part in (os.sep, os.pardir):
            raise OSError(errno.ELOOP, "It leads out of the store, which is not copied", str(place))
