"""Whether a store is whole: its database, the states of its snapshots, and its logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from server.engine.types import Finished, TokenEvent
from server.engine.value import Entry
from server.store.codec import Malformed, decode_value, row_sum, unpack_entry
from server.store.errors import SessionBroken, SnapshotBroken, SnapshotMismatch, StoreTooNew
from server.store.heads import COLUMNS, Head
from server.store.log_rows import Line, unpack_row
from server.store.sqlite.database import FILE_NAME, MIGRATIONS, format_of
from server.store.sqlite.named_files import broken_named
from server.store.sqlite.reader import identity_of, open_for_reading
from server.store.sqlite.signing import FILE_NAME as KEY_NAME
from server.store.sqlite.signing import is_key
from server.store.sqlite.state_files import DIR_NAME
from server.store.state_file import decode_state
from server.store.tables import KEYS, SEGMENTS, LogSegment, is_key_altered

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
            yield f"{FILE_NAME}: {line}"
    yield from _broken_states(execute, path / DIR_NAME)
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
