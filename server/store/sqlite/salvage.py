"""A new store of what can be read of a damaged one, and what was lost of it."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import apsw

from server.engine.session import Entry, SessionValue
from server.engine.types import Finished, TokenEvent
from server.store.base import DiskFiles, SessionBroken, StoreError, StoreFailed
from server.store.codec import Malformed, decode_value, row_sum, sealed
from server.store.snapshots import decode_state
from server.store.sqlite.database import DATABASE_FILE, SqliteDatabase, copy_key, errors_of_sqlite
from server.store.sqlite.files import NAMED_DIR as NAMED_DIR
from server.store.sqlite.files import OWNER_NAME, SNAPSHOTS_DIR, broken_named, files_in
from server.store.sqlite.maintenance import identity_of
from server.store.sqlite.store import open_store
from server.store.tables import COLUMNS, KEYS, SEGMENTS, Head, LogSegment, Tables, is_key_altered

# What can still be read of a damaged database: row by row, from a copy.


Row = dict[str, Any]

#: Numbers of rows that are asked for one by one between two that could be read.
MAX_GAP = 1 << 16


class Damaged:
    """The database of the store at ``path``; ``work`` is an empty folder for a copy of it.

    Raises `apsw.Error` where not even its schema can be read.
    """

    def __init__(self, path: Path, work: Path) -> None:
        copy = work / DATABASE_FILE
        for suffix in ("", "-wal"):
            if (path / f"{DATABASE_FILE}{suffix}").is_file():
                shutil.copyfile(
                    path / f"{DATABASE_FILE}{suffix}", work / f"{DATABASE_FILE}{suffix}"
                )
        _lengthen(copy)
        self._connection = apsw.Connection(str(copy))
        self._connection.execute("PRAGMA writable_schema = ON")  # a page count that is wrong
        tables = "SELECT name FROM sqlite_master WHERE type = 'table'"
        self.tables = {name for (name,) in self._connection.execute(tables)}

    def close(self) -> None:
        self._connection.close(True)

    def rows(self, table: str) -> list[Row]:
        """All that can be read, in their order."""
        if table not in self.tables:
            return []
        if table in ("meta", "request_key"):  # they have no numbers
            return [row for _, row in self._scan(f"SELECT 0, * FROM {table}")]  # noqa: S608
        query = f"SELECT rowid, * FROM {table} "  # noqa: S608
        found = dict(self._scan(query + "ORDER BY rowid"))
        found.update(self._scan(query + "ORDER BY rowid DESC"))
        for number in self._missing(table, found):
            found.update(self._scan(query + f"WHERE rowid = {number:d}"))
        return [found[number] for number in sorted(found)]

    def _missing(self, table: str, found: dict[int, Row]) -> Iterator[int]:
        numbers = sorted(found)
        last = self._last(table)
        if last is not None and (not numbers or numbers[-1] < last):
            numbers.append(last + 1)
        previous = 0
        for number in numbers:
            if number - previous <= MAX_GAP:
                yield from range(previous + 1, number)
            previous = number

    def _last(self, table: str) -> int | None:
        """The highest number that a session ever had; of others it is not known."""
        for _, row in self._scan("SELECT 0, * FROM sqlite_sequence"):
            if row["name"] == table:
                return int(row["seq"])
        return None

    def _scan(self, query: str) -> Iterator[tuple[int, Row]]:
        """Rows up to the first that cannot be read."""
        try:
            cursor = self._connection.execute(query)
            for number, *values in cursor:
                names = [column[0] for column in cursor.description[1:]]
                yield number, dict(zip(names, values, strict=True))
        except apsw.Error:
            return


def _lengthen(file: Path) -> None:
    """Pads the file with zeros up to the size in its header; SQLite refuses a shorter one."""
    with file.open("r+b") as database:
        header = database.read(100)
        page_size = int.from_bytes(header[16:18], "big")
        size = (65536 if page_size == 1 else page_size) * int.from_bytes(header[28:32], "big")
        if 0 < file.stat().st_size < size < 1 << 40:
            database.truncate(size)


# A new store of what can be read of a damaged one, and what was lost of it.
#
# A session whose log is whole is as it was. One that misses a part is kept up to the last
# event that leads on from one of its snapshots. The new store has another id, so that
# clients get ``reset``: none has a cursor into a history that may be shorter now.


#: In the order in which they are written.
TABLES = ("identity", "session", "segment", "snapshot", "request_key", "journal")


Segments = list[tuple[LogSegment, list[Entry]]]


def salvage(path: Path, new: Path) -> Iterator[str]:
    """Makes the store ``new`` of what is left of that at ``path``, which does not change.

    Yields a line for each thing that was lost. Raises `OSError` and
    `StoreError`.
    """
    new.mkdir(mode=0o700, parents=True)
    (new / SNAPSHOTS_DIR).mkdir(mode=0o700)
    with errors_of_sqlite():
        yield from _salvage(path, new)


def _salvage(path: Path, new: Path) -> Iterator[str]:
    with TemporaryDirectory(dir=new) as work:
        damaged = Damaged(path, Path(work))
        try:
            found = {table: damaged.rows(table) for table in (*TABLES, "meta")}
            found["snapshot"] = [_renamed(row) for row in found["snapshot"]]
        finally:
            damaged.close()
    if not found["session"]:
        raise StoreFailed("it has no session that can be read")
    yield from _copy_states(path, new, found)
    yield from _copy_named(path, new)
    if not copy_key(path, new):
        yield "signing.key cannot be read: what was exported before has no valid signature"
    yield from _drop_altered_keys(found)
    _write(new, found)
    if found["identity"]:
        identity = identity_of(found["identity"][-1]["fields"])
        open_store(new, identity).close()  # the journal becomes part of the logs
    yield from _cut(new)


def _renamed(row: Row) -> Row:
    """A snapshot with the column's name of format 2; see `SECOND` in `server.store.tables`."""
    return {"min_length" if name == "length" else name: row[name] for name in row}


def _drop_altered_keys(found: dict[str, list[Row]]) -> Iterator[str]:
    columns = KEYS.removeprefix("SELECT ").partition(" FROM")[0].split(", ")
    kept = []
    for row in found["request_key"]:
        if is_key_altered([row.get(name) for name in columns]):
            yield f"session {row['session_id']}: the record of an idempotency key was altered"
        else:
            kept.append(row)
    found["request_key"] = kept


def _copy_states(path: Path, new: Path, found: dict[str, list[Row]]) -> Iterator[str]:
    """Snapshots whose states are whole; the others are dropped."""
    identities = {row["key"]: row["fields"] for row in found["identity"]}
    ids = {row["key"]: row["id"] for row in found["session"]}
    kept: list[Row] = []
    for row in found["snapshot"]:
        fields, file = identities.get(row["identity"]), row["file"]
        try:
            value = _value(row, fields)
            if file is not None:
                data = (path / SNAPSHOTS_DIR / file).read_bytes()
                decode_state(data, identity_of(str(fields)), value.position)
                (new / SNAPSHOTS_DIR / file).parent.mkdir(mode=0o700, exist_ok=True)
                shutil.copyfile(path / SNAPSHOTS_DIR / file, new / SNAPSHOTS_DIR / file)
            kept.append(row)
        except (Malformed, OSError, StoreError) as error:
            yield f"session {ids.get(row['session'])}: a snapshot: {error}"
    found["snapshot"] = kept


def _copy_named(path: Path, new: Path) -> Iterator[str]:
    """Named states that are whole."""
    broken = dict(broken_named(path))
    for file in files_in(path):
        if file in broken:
            yield f"the named state {file.stem}: {broken[file]}"
            continue
        (new / NAMED_DIR).mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(file, new / NAMED_DIR / file.name)


def _value(row: Row, fields: str | None) -> SessionValue:
    """Raises `Malformed`."""
    columns = (row["session"], row["place"], row["min_length"], row["value"], row["file"])
    if fields is None or row.get("sum") != row_sum(*columns, fields):
        raise Malformed("its row was altered")
    return decode_value(row["value"])


def _write(new: Path, found: dict[str, list[Row]]) -> None:
    """The rows into a new database."""
    database = SqliteDatabase(new, None, True)
    store_id = secrets.token_hex(8)
    with database.transaction():
        for name, value in (("store_id", store_id), ("fence", 0)):
            database.set_meta(name, value)
        for row in found["meta"]:
            if row["name"] == "clock_s":
                database.set_meta("clock_s", row["value"])
        for table in TABLES:
            for row in found[table]:
                _insert(database, table, row)
        _pass_numbers(database, found)
    database.close()
    DiskFiles().write(new / SNAPSHOTS_DIR / OWNER_NAME, [store_id.encode()])


def _pass_numbers(database: SqliteDatabase, found: dict[str, list[Row]]) -> None:
    """The number of a lost row is not used again, for a session or in the journal."""
    heads = map(Head.read, database.execute(f"SELECT {COLUMNS} FROM session").fetchall())  # noqa: S608
    rows = [*(row["id"] for row in found["journal"])]
    last = max([*rows, *(head.journal for head in heads if head.broken is None)], default=0)
    empty = (last + 1, b"[]", sealed("[]"))
    database.execute("INSERT INTO journal VALUES (?, ?, ?)", empty)
    keys = [row["session"] for table in ("segment", "request_key") for row in found[table]]
    keys = [
        key for key in keys if isinstance(key, int)
    ]  # what is read of a damaged row may be null
    query = "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'session'"
    database.execute(query, (max(keys, default=0),))


def _insert(database: SqliteDatabase, table: str, row: Row) -> None:
    names = ", ".join(f'"{name}"' for name in row)
    places = ", ".join("?" * len(row))
    query = f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({places})"  # noqa: S608
    database.execute(query, tuple(row.values()))


def _cut(new: Path) -> Iterator[str]:
    """Each session to what leads on from one of its snapshots without a gap."""
    database = SqliteDatabase(new, None, True)
    execute, tables = database.execute, Tables(database)
    with database.transaction():
        ((last_row,),) = execute("SELECT max(id) FROM journal").fetchall()
        assert isinstance(last_row, int), last_row
        for row in execute(f"SELECT {COLUMNS} FROM session").fetchall():  # noqa: S608
            head = Head.read(row)
            segments = _segments(execute, head)
            reach = _reach(execute, head, segments)
            if reach is None:
                yield f"session {head.id}: lost: no snapshot of it can be read"
                tables.delete_session(head.key, float(database.meta("clock_s") or 0.0))
                continue
            if head.broken is not None or reach.seq < head.seq:
                yield f"session {head.id}: kept up to event {reach.seq} of {head.seq}"
            first, log_seq = _beginning(reach, segments)
            if log_seq > head.log_seq:
                yield f"session {head.id}: its events up to {log_seq} cannot be read again"
            _shorten(execute, head, reach, first, max(log_seq, head.log_seq), last_row)
        _drop_the_rest(execute)
    database.checkpoint(truncate=True)
    database.close()


def _segments(execute: Any, head: Head) -> Segments:
    """Those that can be read."""
    found: Segments = []
    for row in execute(SEGMENTS + "ORDER BY first", (head.key,)).fetchall():
        segment = LogSegment(*row)
        try:
            found.append((segment, segment.entries(head.key)))
        except SessionBroken:
            execute(
                "DELETE FROM segment WHERE session = ? AND first = ?", (head.key, segment.first)
            )
    return found


def _reach(execute: Any, head: Head, segments: Segments) -> Head | None:
    """The session where any of its snapshots leads furthest."""
    query = "SELECT place, value FROM snapshot WHERE session = ? ORDER BY key"
    found = [
        _folded(head.key, place, decode_value(value), segments)
        for place, value in execute(query, (head.key,)).fetchall()
    ]
    return max(found, key=lambda reach: reach.num_entries, default=None)


def _folded(key: int, place: int, value: SessionValue, segments: Segments) -> Head:
    reach = Head.of(key, value, 0)
    reach.num_stored = place
    for segment, entries in segments:
        if segment.first <= reach.num_entries < segment.end:
            for entry in entries[reach.num_entries - segment.first :]:
                reach.add(entry, 0)
    return reach


def _beginning(reach: Head, segments: Segments) -> tuple[int, int]:
    """The first entry that leads to ``reach`` without a gap, and the event before it."""
    first, log_seq = reach.num_entries, reach.seq
    for segment, entries in reversed(segments):
        if segment.first < first <= segment.end:
            first = segment.first
            seqs = [entry.seq for entry in entries if isinstance(entry, TokenEvent | Finished)]
            log_seq = min(seqs, default=log_seq + 1) - 1
    return first, log_seq


def _shorten(
    execute: Any, head: Head, reach: Head, first: int, log_seq: int, last_row: int
) -> None:
    """The session has the entries from ``first`` to ``reach``."""
    end = head.num_stored = reach.num_entries
    head.epoch, head.length, head.seq = reach.epoch, reach.length, reach.seq
    head.running, head.journal = reach.running, last_row
    where = "session = ? AND (first < ? OR first >= ?)"
    execute(f"DELETE FROM segment WHERE {where}", (head.key, first, end))  # noqa: S608
    where = "session = ? AND (place < ? OR place > ?)"
    execute(f"DELETE FROM snapshot WHERE {where}", (head.key, first, end))  # noqa: S608
    execute(
        "UPDATE session SET epoch = ?, length = ?, seq = ?, running = ?, num_entries = ?, "
        "log_seq = ?, journal = ?, broken = NULL, sum = ? WHERE key = ?",
        (
            *(head.epoch, head.length, head.seq, head.running, end),
            *(log_seq, last_row, head.sum, head.key),
        ),
    )


def _drop_the_rest(execute: Any) -> None:
    """What belongs to no session, and the journal, whose rows are in the logs."""
    for table in ("segment", "snapshot"):
        execute(f"DELETE FROM {table} WHERE session NOT IN (SELECT key FROM session)")  # noqa: S608
    execute("DELETE FROM journal WHERE id < (SELECT max(id) FROM journal)")
