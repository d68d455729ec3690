"""Whether a store is whole: its database, the states of its snapshots, and its logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw

from server.engine.types import Finished, TokenEvent
from server.engine.value import Entry
from server.store.base import Identity
from server.store.codec import (
    Malformed,
    decode_json,
    decode_value,
    running_after,
    unpack_entries,
    unpack_entry,
)
from server.store.database import FILE_NAME
from server.store.errors import SnapshotBroken, SnapshotMismatch
from server.store.migrations import MIGRATIONS
from server.store.state_file import decode_state
from server.store.state_files import DIR_NAME

Execute = Callable[..., Any]


def open_for_reading(path: Path) -> apsw.Connection:
    """The database of the store at ``path``, which may be in use. Raises errors of SQLite's."""
    connection = apsw.Connection(str(path / FILE_NAME), flags=apsw.SQLITE_OPEN_READONLY)
    connection.set_busy_timeout(5000)
    return connection


def identity_of(fields: str) -> Identity:
    """The identity in a row of the database."""
    strings = decode_json(fields)
    return Identity(**{**strings, "state_bytes": int(strings["state_bytes"])})


def problems(path: Path) -> Iterator[str]:
    """A line for each thing that is wrong with the store at ``path``; nothing is changed."""
    connection = open_for_reading(path)
    try:
        connection.execute("BEGIN")  # all of it as it is at one moment
        yield from _problems(connection.execute, path)
    finally:
        connection.close(True)


def _problems(execute: Execute, path: Path) -> Iterator[str]:
    (version,) = execute("PRAGMA user_version").fetchone()
    if version != len(MIGRATIONS):
        yield f"the store has format {version}, and this version of everstream {len(MIGRATIONS)}"
        return
    for (line,) in execute("PRAGMA integrity_check"):
        if line != "ok":
            yield f"{FILE_NAME}: {line}"
    yield from _broken_states(execute, path / DIR_NAME)
    ends: dict[int, tuple[str, int, int, str | None]] = {}
    for key, id, log_seq, count, seq, journal, running in execute(
        "SELECT key, id, log_seq, num_entries, seq, journal, running FROM session"
    ).fetchall():
        yield from _broken_log(execute, key, id, log_seq, count, seq)
        ends[key] = (id, seq, journal, running)
    yield from _broken_journal(execute, ends)
    yield from _nobody_s(execute)


def _nobody_s(execute: Execute) -> Iterator[str]:
    """What is left of sessions that are gone."""
    for table in ("snapshot", "segment"):
        query = f"SELECT COUNT(*) FROM {table} WHERE session NOT IN (SELECT key FROM session)"  # noqa: S608
        (count,) = execute(query).fetchone()
        if count:
            yield f"{count} rows of {table} belong to no session"


def _broken_states(execute: Execute, folder: Path) -> Iterator[str]:
    query = (
        "SELECT session.id, value, file, fields FROM snapshot "
        "JOIN identity ON identity.key = snapshot.identity "
        "LEFT JOIN session ON session.key = snapshot.session"
    )
    seen: set[str] = set()
    for id, value, file, fields in execute(query):
        try:
            position = decode_value(value).position
            if file is not None and file not in seen:
                seen.add(file)
                decode_state((folder / file).read_bytes(), identity_of(fields), position)
        except (Malformed, OSError, SnapshotBroken, SnapshotMismatch) as error:
            yield f"session {id}: snapshot {file}: {error}"


def _broken_log(
    execute: Execute, key: int, id: str, seq: int, count: int, last_seq: int
) -> Iterator[str]:
    """From event ``seq`` on, without gaps, up to ``count`` entries and event ``last_seq``."""
    query = 'SELECT first, "end", running, data FROM segment WHERE session = ? ORDER BY first'
    place: int | None = None
    for first, end, running, data in execute(query, (key,)):
        if place not in (None, first):
            yield f"session {id}: its log has a gap before entry {first}"
        place = end
        try:
            entries = unpack_entries(data, running)
        except (Malformed, TypeError) as error:
            yield f"session {id}: its log cannot be read from entry {first} on: {error}"
            return
        if len(entries) != end - first:
            yield f"session {id}: its log has {len(entries)} entries from {first} to {end}"
        for entry in entries:
            if not _follows(entry, seq):
                yield f"session {id}: its log has a gap after event {seq}"
            seq = _seq_after(entry, seq)
    if place not in (None, count) or (place is None and count):
        yield f"session {id}: its log has {place or 0} of {count} entries"
    elif seq != last_seq:
        yield f"session {id}: its log ends at event {seq} of {last_seq}"


def _broken_journal(
    execute: Execute, ends: dict[int, tuple[str, int, int, str | None]]
) -> Iterator[str]:
    for row, data in execute("SELECT id, data FROM journal ORDER BY id"):
        try:
            for key, packed, *_ in decode_json(data):
                id, seq, journal, running = ends.get(key, ("", 0, row, None))
                if row <= journal:
                    continue
                entry = unpack_entry(packed, running)
                if not _follows(entry, seq):
                    yield f"session {id}: the journal has a gap after event {seq}"
                ends[key] = (id, _seq_after(entry, seq), journal, running_after(entry, running))
        except (Malformed, TypeError, ValueError) as error:
            yield f"row {row} of the journal cannot be read: {error}"


def _seq_after(entry: Entry, seq: int) -> int:
    return entry.seq if isinstance(entry, TokenEvent | Finished) else seq


def _follows(entry: Entry, seq: int) -> bool:
    """Whether ``entry`` can come after event ``seq``."""
    if isinstance(entry, TokenEvent):
        return entry.seq == seq + 1
    return not isinstance(entry, Finished) or entry.seq in (seq, seq + 1)
