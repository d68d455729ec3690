"""Rows of the journal: a line for each entry, so that damage costs the session of its line alone.

A row is a JSON list with an element on each line: the session's key, the entry, and a
CRC-32 of both that begins with the number of the entry in its session's log. So a line
that is altered, missing or at another place is noticed. The keys of all lines stand
once more next to the row, for the case that a line does not even tell its session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

from server.engine.types import Finished, TokenEvent
from server.engine.value import Accepted, Entry, Rewound, Saved
from server.store.codec import (
    Malformed,
    decode_json,
    encode,
    pack_entry,
    running_after,
    sealed,
    unsealed,
)
from server.store.errors import SessionBroken
from server.store.heads import Head

BETWEEN = b",\n"
#: Entries that are counted in a log.
COUNTED = (TokenEvent, Accepted, Finished, Rewound)


class StoredState(NamedTuple):
    """Where the state of a new session is, and what it belongs to."""

    file: str | None
    identity_key: int


LoggedEntry = tuple[Head, Entry, StoredState | None]


class Line(NamedTuple):
    """An entry as it is in a row."""

    key: int
    entry: Any
    rest: Sequence[Any]
    body: bytes
    sum: int

    def is_entry(self, number: int) -> bool:
        """Whether it is as it was written for this number of its session's log."""
        return self.sum == crc32(self.body, number)


class LogRow(NamedTuple):
    """Lines that can be read. ``keys``: of all that there were, None where that is not known."""

    lines: list[Line]
    keys: Counter[int] | None
    is_whole: bool

    def of(self, key: int) -> list[Line]:
        """The lines of a session. Raises `SessionBroken` where one of them may be missing."""
        found = [line for line in self.lines if line.key == key]
        is_lost = not self.is_whole if self.keys is None else self.keys[key] != len(found)
        if is_lost:
            raise SessionBroken
        return found


def pack_row(steps: Sequence[LoggedEntry]) -> tuple[bytes, str] | None:
    """A row and its keys; None where nothing has happened that belongs into it."""
    running: dict[Head, str | None] = {}
    numbers: dict[Head, int] = {}
    keys, lines = [], []
    for head, entry, kept in steps:
        kind = type(entry)
        if kind is Saved:
            continue
        number = numbers.get(head)
        if number is None:
            number = head.num_entries
        now = running.get(head, head.running) if running else head.running
        packed = pack_entry(entry, now)
        body = encode((head.key, packed) if kept is None else (head.key, packed, kept))
        if kind is not TokenEvent or entry.request_id != now:  # type: ignore[union-attr]
            running[head] = running_after(entry, now)
        lines.append(b"%b,%d]" % (body[:-1], crc32(body, number)))
        keys.append(head.key)
        numbers[head] = number + (kind in COUNTED)
    if not lines:
        return None
    return b"[" + BETWEEN.join(lines) + b"]", sealed(encode(keys).decode())


def unpack_row(data: bytes, keys: str) -> LogRow:
    """Of what `pack_row` has made, all that can still be read."""
    found = [_line(line) for line in data[1:-1].split(BETWEEN)] if data != b"[]" else []
    lines = [line for line in found if line is not None]
    text = unsealed(keys)
    known = None if text is None else Counter[int](decode_json(text))
    is_whole = len(lines) == len(found) and data[:1] + data[-1:] == b"[]"
    return LogRow(lines, known, is_whole)


def _line(line: bytes) -> Line | None:
    body, _, stored = line.rpartition(b",")
    body += b"]"
    try:
        key, entry, *rest = decode_json(body)
        is_line = type(key) is int and isinstance(entry, list) and entry and line.endswith(b"]")
        return Line(key, entry, rest, body, int(stored[:-1])) if is_line else None
    except (Malformed, ValueError, TypeError):
        return None
