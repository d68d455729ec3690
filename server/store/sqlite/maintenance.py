"""Copies and checks of a store that another process may have open."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from server.engine.session import Entry
from server.engine.types import Finished, TokenEvent
from server.store.base import (
    DiskFiles,
    Files,
    Identity,
    SessionBroken,
    SnapshotBroken,
    SnapshotMismatch,
    StoreTooNew,
    create,
)
from server.store.codec import Malformed, decode_json, decode_value, row_sum, unpack_entry
from server.store.log import Line, unpack_row
from server.store.rows import COLUMNS, KEYS, SEGMENTS, Head, LogSegment, is_key_altered
from server.store.sqlite.database import (
    DATABASE_FILE,
    MIGRATIONS,
    errors_of_sqlite,
    format_of,
    is_key,
)
from server.store.sqlite.database import KEY_FILE as KEY_NAME
from server.store.sqlite.files import NAMED_DIR as NAMED_DIR
from server.store.sqlite.files import OWNER_NAME, SNAPSHOTS_DIR, broken_named, files_in
from server.store.states import decode_state

# -------------------------------------------------------------------------------------------------
# Questions to the store in a folder that another process may have open.


@contextmanager
def open_for_reading(path: Path) -> Iterator[apsw.Connection]:
    """The database of the store at ``path``. Raises `StoreError`, here and within."""
    with errors_of_sqlite():
        connection = apsw.Connection(str(path / DATABASE_FILE), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            connection.set_busy_timeout(5000)
            yield connection
        finally:
            connection.close(True)


def identity_of(fields: str) -> Identity:
    """The identity in a row of the database."""
    return Identity.of(decode_json(fields))


def newest_identity(path: Path) -> Identity | None:
    """What the newest states of a store belong to; None where it has none. Raises `StoreError`."""
    for (fields,) in _rows(path, "SELECT fields FROM identity ORDER BY key DESC LIMIT 1"):
        return identity_of(str(fields))
    return None


def owner_of(path: Path, session: str) -> str | None:
    """Whose a session is. Raises `StoreError`."""
    for (owner,) in _rows(path, "SELECT owner FROM session WHERE id = ?", session):
        return str(owner)
    return None


def owner_and_identity(path: Path, session: str) -> tuple[str, Identity] | None:
    """Whose a session is, and what its newest snapshot belongs to. Raises `StoreError`."""
    query = (
        "SELECT owner, fields FROM session JOIN snapshot ON snapshot.session = session.key "
        "JOIN identity ON identity.key = snapshot.identity WHERE session.id = ? "
        "ORDER BY snapshot.key DESC LIMIT 1"
    )
    for owner, fields in _rows(path, query, session):
        return str(owner), identity_of(str(fields))
    return None


def num_sessions(path: Path) -> int:
    """How many sessions a store has. Raises `StoreError`."""
    ((count,),) = _rows(path, "SELECT count(*) FROM session")
    return int(str(count))


def _rows(path: Path, query: str, *values: str) -> list[tuple[object, ...]]:
    with open_for_reading(path) as connection:
        return list(connection.execute(query, values))


# -------------------------------------------------------------------------------------------------
# A copy of a store that may be in use: its database as of one moment, and the states of then.
#
# A state's file never changes. It is there before a row names it, and goes after the last row that
# did. So most files are copied first; then a read transaction fixes the moment, and what it names
# and is still missing is copied; then the database, page by page, as that transaction sees it. The
# server writes all the while. A file that went in between belongs to a moment that is over: another
# transaction is begun.


PAGES_AT_ONCE = 1000
#: Folders of a store that have no other store.
_LEAVES = {SNAPSHOTS_DIR, NAMED_DIR, "prefixes"}


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
        if DATABASE_FILE in files:
            found.append(Path(folder))
    return found


def back_up(
    path: Path,
    new: Path,
    note: Callable[[str], None] = lambda _: None,
    pages_at_once: int = PAGES_AT_ONCE,
) -> Backup:
    """Copies the store at ``path`` to the empty folder ``new``; `sync_tree` is the caller's duty.

    ``note`` gets lines that tell how far it is. Raises `OSError` and `StoreError`.
    """
    _refuse_links(path, Path(DATABASE_FILE))
    (new / SNAPSHOTS_DIR).mkdir(mode=0o700)
    copied: set[str] = set()

    def copy(files: Iterable[str]) -> set[str]:
        """Those that are not there."""
        gone = set()
        for file in files:
            if _is_copied(path, Path(SNAPSHOTS_DIR, file), new):
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
                _copy_database(source, new, note, pages_at_once)
                break
    for file in copied - used:
        (new / SNAPSHOTS_DIR / file).unlink()
    for named in files_in(path):
        _is_copied(path, Path(NAMED_DIR, named.name), new)
    _is_copied(path, Path(KEY_NAME), new)
    return Backup(int(str(num_sessions)), len(used - gone), sorted(gone))


def sync_tree(path: Path, files: Files | None = None) -> None:
    """All that is in a folder is on the disk when this returns."""
    files = files or DiskFiles()
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
        connection = apsw.Connection(str(path / DATABASE_FILE), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            format_of(connection)
            # Without this file the states belong to the database, whichever id that has.
            (path / SNAPSHOTS_DIR / OWNER_NAME).unlink(missing_ok=True)
            DiskFiles().sync_dir(path / SNAPSHOTS_DIR)
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


def _copy_database(
    source: apsw.Connection, new: Path, note: Callable[[str], None], pages_at_once: int
) -> None:
    os.close(create(new / DATABASE_FILE))
    copy = apsw.Connection(str(new / DATABASE_FILE))
    try:
        with copy.backup("main", source, "main") as backup:
            while not backup.done:
                backup.step(pages_at_once)
                done = backup.page_count - backup.remaining
                note(f"{done} of {backup.page_count} pages of the database")
    finally:
        copy.close()
    for (store_id,) in source.execute("SELECT value FROM meta WHERE name = 'store_id'"):
        DiskFiles().write(new / SNAPSHOTS_DIR / OWNER_NAME, [str(store_id).encode()])


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


# -------------------------------------------------------------------------------------------------
# Whether a store is whole: its database, the states of its snapshots, and its logs.


Execute = Callable[..., Any]


def problems(path: Path) -> Iterator[str]:
    """A line for each thing that is wrong with the store at ``path``; nothing is changed.

    Raises `StoreError`.
    """
    with open_for_reading(path) as connection:
        connection.execute("BEGIN")  # all of it as it is at one moment
        try:
            if (version := format_of(connection)) == len(MIGRATIONS):
                yield from _problems(connection.execute, path)
            else:
                yield f"the store has format {version}: the next start of the server migrates it"
        except StoreTooNew as error:
            yield error.message
    for file, why in broken_named(path):
        yield f"the named state {file.stem}: {why}"
    if (path / KEY_NAME).exists() and not is_key(path):
        yield (
            f"{KEY_NAME} is not a key: the server does not start with it. Put it back, or remove "
            "it; without it, what was exported before has no valid signature"
        )


def _problems(execute: Execute, path: Path) -> Iterator[str]:
    for (line,) in execute("PRAGMA integrity_check"):
        if line != "ok":
            yield f"{DATABASE_FILE}: {line}"
    yield from _broken_states(execute, path / SNAPSHOTS_DIR)
    heads: dict[int, Head] = {}
    for row in execute(f"SELECT {COLUMNS} FROM session").fetchall():  # noqa: S608
        head = Head.read(row)
        if head.broken is not None:
            yield f"session {head.id}: {head.broken}"
        yield from _broken_log(execute, head)
        heads[head.key] = head
    yield from _broken_journal(execute, heads)
    yield from _broken_keys(execute)
    yield from _orphans(execute)


def _broken_keys(execute: Execute) -> Iterator[str]:
    for row in execute(KEYS):
        if is_key_altered(row):
            yield f"session {row[3]}: the record of an idempotency key was altered"


def _orphans(execute: Execute) -> Iterator[str]:
    """What is left of sessions that are gone."""
    for table in ("snapshot", "segment"):
        query = f"SELECT COUNT(*) FROM {table} WHERE session NOT IN (SELECT key FROM session)"  # noqa: S608
        (count,) = execute(query).fetchone()
        if count:
            yield f"{count} rows of {table} belong to no session"


def _broken_states(execute: Execute, folder: Path) -> Iterator[str]:
    query = (
        "SELECT session.id, fields, snapshot.sum, session, place, min_length, value, file "
        "FROM snapshot LEFT JOIN identity ON identity.key = snapshot.identity "
        "LEFT JOIN session ON session.key = snapshot.session"
    )
    seen: set[str] = set()
    for id, fields, stored, *columns in execute(query):
        *_, value, file = columns
        if fields is None or stored != row_sum(*columns, fields):
            yield f"session {id}: the row of snapshot {file} was altered"
            continue
        try:
            position = decode_value(value).position
            if file is not None and file not in seen:
                seen.add(file)
                decode_state((folder / file).read_bytes(), identity_of(fields), position)
        except (Malformed, OSError, SnapshotBroken, SnapshotMismatch) as error:
            yield f"session {id}: snapshot {file}: {error}"


def _broken_log(execute: Execute, head: Head) -> Iterator[str]:
    """From event ``log_seq`` on, without gaps, up to ``num_stored`` entries and event ``seq``."""
    id, seq, place = head.id, head.log_seq, None
    for row in execute(SEGMENTS + "ORDER BY first", (head.key,)):
        segment = LogSegment(*row)
        if place not in (None, segment.first):
            yield f"session {id}: its log has a gap before entry {segment.first}"
        place = segment.end
        try:
            entries = segment.entries(head.key)
        except SessionBroken:
            yield f"session {id}: its log cannot be read from entry {segment.first} on"
            return
        if len(entries) != segment.end - segment.first:
            yield (
                f"session {id}: its log has {len(entries)} entries "
                f"from {segment.first} to {segment.end}"
            )
        for entry in entries:
            if not _follows(entry, seq):
                yield f"session {id}: its log has a gap after event {seq}"
            seq = entry.seq if isinstance(entry, TokenEvent | Finished) else seq
    if place is None and seq == head.seq:
        return  # a snapshot has it all
    if place != head.num_stored:
        yield f"session {id}: its log has {place or 0} of {head.num_stored} entries"
    elif seq != head.seq:
        yield f"session {id}: its log ends at event {seq} of {head.seq}"


def _broken_journal(execute: Execute, heads: dict[int, Head]) -> Iterator[str]:
    """``heads`` are the sessions by key."""
    previous: int | None = None
    for number, data, keys in execute("SELECT id, data, keys FROM journal ORDER BY id"):
        if previous is not None and number != previous + 1:
            yield f"rows {previous + 1} to {number - 1} of the journal are missing"
        previous = number
        row = unpack_row(data, keys)
        if not row.is_whole or row.keys is None:
            yield f"row {number} of the journal was altered"
        for key in row.keys - Counter(line.key for line in row.lines) if row.keys else ():
            id = heads[key].id if key in heads else f"number {key}"
            yield f"session {id}: its entry in row {number} of the journal was altered"
        for line in row.lines:
            if line.key in heads:
                head = heads[line.key]
                if head.broken is None and number > head.journal:
                    yield from _broken_line(line, head, number)


def _broken_line(line: Line, head: Head, number: int) -> Iterator[str]:
    """Brings ``head`` forward by the line."""
    try:
        entry = unpack_entry(line.entry, head.running)
        is_good = line.is_entry(head.num_entries)
    except (Malformed, TypeError):
        is_good = False
    if not is_good:
        yield f"session {head.id}: its entry in row {number} of the journal was altered"
        head.broken = "its log continues after an altered part"
        return
    if not _follows(entry, head.seq):
        yield f"session {head.id}: the journal has a gap after event {head.seq}"
    head.add(entry, number)


def _follows(entry: Entry, seq: int) -> bool:
    """Whether ``entry`` can come after event ``seq``."""
    if isinstance(entry, TokenEvent):
        return entry.seq == seq + 1
    return not isinstance(entry, Finished) or entry.seq in (seq, seq + 1)
