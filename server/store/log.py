"""The log of all sessions: a journal with one row for each commit, its rows, and its redo."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from server.engine.session import Accepted, Deleted, Entry, Opened, Record, Rewound, Saved
from server.engine.types import Finished, TokenEvent
from server.store.base import SessionBroken, StoreLost, brief
from server.store.codec import (
    Malformed,
    decode_json,
    encode,
    pack_entry,
    running_after,
    sealed,
    unpack_entry,
    unsealed,
)
from server.store.rows import Database, Head, Tables
from server.store.states import SnapshotRow, Snapshots, Unsaved

# -------------------------------------------------------------------------------------------------
# Rows of the journal: a line for each entry, so that damage costs the session of its line alone.
#
# A row is a JSON list with an element on each line: the session's key, the entry, and a
# CRC-32 of both that begins with the number of the entry in its session's log. So a line
# that is altered, missing or at another place is noticed. The keys of all lines stand
# once more next to the row, for the case that a line does not even tell its session.


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


# -------------------------------------------------------------------------------------------------
# A commit is one row, written and synced by itself: that row is the whole truth
# about it. The other tables are brought up to it right after, without a sync of
# their own, because whatever of that is lost is done over from the journal.
#
# Tokens are most of what there is, so that each loop deals with them first.


logger = logging.getLogger(__name__)

#: A tail of so many entries becomes a segment; with as many more, by the session's
#: key, so that sessions that began together do not do so in the same tick.
SEGMENT_ENTRIES = 256
#: A tail becomes a segment, however short, when the journal has grown by so many rows.
MAX_JOURNAL_ROWS = 4096


#: Number, data and keys.
JournalRow = tuple[int, bytes, str]


class Log:
    """The journal and the newest entries of each session, on one connection.

    After an error of any method but `append` it cannot be used again: another one
    recovers from the disk. ``unsaved`` outlives it.
    """

    max_journal_rows = MAX_JOURNAL_ROWS

    def __init__(
        self, database: Database, tables: Tables, snapshots: Snapshots, unsaved: Unsaved
    ) -> None:
        self._database, self._tables, self._snapshots = database, tables, snapshots
        self._unsaved = unsaved
        self._execute: Callable[..., Any] = database.execute
        self.heads: dict[str, Head] = {}
        self.last_row = self.pruned_row = 0
        self.changed: set[Head] = set()
        self.unused_files: set[str] = set()
        self.next_key = 1

    def head(self, session: str) -> Head | None:
        """The session after its last entry."""
        head = self.heads.get(session)
        if head is None:
            head = self._tables.head(session)
            if head is not None and head.broken is None:
                self.heads[session] = head
        return head

    # Writing

    def append(self, records: Sequence[Record]) -> list[LoggedEntry]:
        """Adds ``records``, durably, and says what is left for `settle` to do.

        On an error nothing of them counts, and nothing here has changed; where the database is
        another machine's, a recovery finds out. Raises `StoreLost`, `Fenced`, and errors of
        the database and the file system.
        """
        next_key, new_files = self.next_key, dict[int, str]()
        try:
            steps = self._steps(records, new_files)
            self._add_row(steps)
        except BaseException:
            self.next_key = next_key
            self._snapshots.states.remove(new_files.values())
            raise
        return steps

    def _add_row(self, steps: Sequence[LoggedEntry]) -> None:
        """The row after the last, durably, if anything has happened that belongs into it."""
        packed = pack_row(steps)
        if packed is not None:
            self._insert_row(*packed, steps)
            self.last_row += 1

    def _insert_row(self, data: bytes, keys: str, steps: Sequence[LoggedEntry]) -> None:
        with self._database.transaction():
            row = (self.last_row + 1, data, keys)
            self._execute("INSERT INTO journal VALUES (?, ?, ?)", row)

    def settle(self, steps: Iterable[LoggedEntry], now_s: float) -> None:
        """Does what follows from records that have been added."""
        due = self.advance(steps, self.last_row)
        if due is not None:
            with self._database.transaction(synced=False):
                self.apply(steps, due, self.last_row, now_s)

    def _steps(self, records: Sequence[Record], new_files: dict[int, str]) -> list[LoggedEntry]:
        """Which session each record means; states of new sessions are in files."""
        steps: list[LoggedEntry] = []
        changed: dict[str, Head | None] = {}
        heads = self.heads
        for id, entry in records:
            if type(entry) is TokenEvent and id in heads and not changed:
                steps.append((heads[id], entry, None))
                continue
            head = changed[id] if id in changed else self.head(id)
            kept = None
            if isinstance(entry, Opened):
                assert head is None, id
                kept = StoredState(self._keep_state(entry, new_files), self._snapshots.identity_key)
                head = changed[id] = Head.of(self.next_key, entry.value, self.last_row)
                self.next_key += 1
            elif isinstance(entry, Deleted):
                changed[id] = None
                if head is None:
                    continue
            if head is None or (head.broken is not None and not isinstance(entry, Deleted)):
                raise StoreLost(f"the store has no session {id}")
            steps.append((head, entry, kept))
        return steps

    def _keep_state(self, entry: Opened, new_files: dict[int, str]) -> str | None:
        """The file of the state; sessions that are opened together may share one."""
        state = entry.value.state
        if state is None:
            return None
        file = new_files.get(id(state)) or self._snapshots.file_of(state)
        if file is None:
            (file,) = self._snapshots.states.write([(state, entry.value.position)])
            new_files[id(state)] = state.file = file
        return file

    # What follows from a commit

    def advance(self, steps: Iterable[LoggedEntry], row: int) -> set[Head] | None:
        """Brings the heads forward; those whose tails are due, None if nothing else is to do."""
        due: set[Head] = set()
        is_settled = True
        for head, entry, _ in steps:
            if type(entry) is TokenEvent:
                if head.add_token(entry, row) >= SEGMENT_ENTRIES + head.key % SEGMENT_ENTRIES:
                    due.add(head)
                continue
            head.add(entry, row)
            self._note_value(head, entry)
            if isinstance(entry, Saved) or (
                isinstance(entry, Accepted) and entry.request.key is None
            ):
                continue
            is_settled = False
            if isinstance(entry, Deleted):
                due.discard(head)
            else:
                due.add(head)
            if isinstance(entry, Opened):
                self.heads[head.id] = head
        return None if is_settled and not due else due

    def _note_value(self, head: Head, entry: Entry) -> None:
        """A value that need not be on the disk yet: the log leads to it from an older one."""
        if isinstance(entry, Deleted):
            self._unsaved.drop(head.id)
        elif isinstance(entry, Saved | Rewound):
            value = entry.value
            if value.state is not None or not value.has_state:  # the journal has no states
                self._unsaved.add(head, value)
            elif isinstance(entry, Rewound):
                self._unsaved.cut(head, value.length)

    def apply(
        self, steps: Iterable[LoggedEntry], due: Iterable[Head], row: int, now_s: float
    ) -> None:
        """Brings the tables up to row ``row`` of the journal."""
        for head, entry, kept in steps:
            match entry:
                case Opened():
                    self._add_session(head, entry, kept, now_s)
                case Accepted() if entry.request.key is not None:
                    self._tables.begin_key(head, entry)
                case Finished():
                    self._tables.end_key(head, entry)
                case Rewound():
                    self._cut(head, entry.value.length)
                case Deleted():
                    self.delete(head, now_s)
        self.store_tails(due, row, now_s)

    def _add_session(
        self, head: Head, entry: Opened, kept: StoredState | None, now_s: float
    ) -> None:
        assert kept is not None, head.id
        self._tables.add_session(head, now_s)
        num_bytes = self._snapshots.add(head.key, 0, entry.value, *kept)
        self._tables.grow(head.key, num_bytes)

    def _cut(self, head: Head, length: int) -> None:
        """What was saved beyond ``length`` tokens of the text leads to no part of it any more."""
        rows = [row for row in self._snapshots.rows(head.key) if row.min_length > length]
        self.drop_snapshots(head.key, rows)

    def store_tails(self, heads: Iterable[Head], row: int, now_s: float) -> None:
        """Tails become segments; nothing in rows of the journal up to ``row`` is missing then."""
        for head in heads:
            self._tables.store_tail(head, row, now_s)
            self.changed.add(head)

    def drop_snapshots(self, key: int, rows: Sequence[SnapshotRow]) -> None:
        """Deletes snapshots of a session; their files are unused then, perhaps."""
        self._snapshots.drop(rows)
        self._tables.grow(key, -sum(row.bytes for row in rows))
        self.unused_files.update(row.file for row in rows if row.file is not None)

    def delete(self, head: Head, now_s: float) -> None:
        """Deletes a session."""
        rows = self._snapshots.rows(head.key)
        self.unused_files.update(row.file for row in rows if row.file is not None)
        self._tables.delete_session(head.key, now_s)
        self.heads.pop(head.id, None)
        self.changed.discard(head)

    def prune(self, now_s: float) -> None:
        """Stores old tails, and drops the rows of the journal that no tail needs."""
        old = self.last_row - self.max_journal_rows
        tails = [head for head in self.heads.values() if head.tail]
        self.store_tails([head for head in tails if head.tail_journal < old], self.last_row, now_s)
        first = min((head.tail_journal for head in tails if head.tail), default=self.last_row)
        # The last row stays, so that no number is given twice.
        self._drop_rows_before(first)
        self.pruned_row = self.last_row

    def _drop_rows_before(self, row: int) -> None:
        self._execute("DELETE FROM journal WHERE id < ?", (row,))

    # Recovery

    def keys_of_journal(self) -> set[int]:
        """The sessions that have something in the journal, as far as it can be read."""
        rows = [unpack_row(data, keys) for _, data, keys in self._rows()]
        return {key for row in rows for key in (row.keys or (line.key for line in row.lines))}

    def quarantine(self, key: int, why: str) -> str:
        """Puts the session into quarantine; returns its name."""
        self._tables.quarantine(key, why)
        head = self._tables.head_of_key(key)
        return f"number {key}" if head is None else head.id

    def rows_up_to(self, last_row: int | None) -> list[JournalRow]:
        """The rows of the journal, after those behind ``last_row`` have been deleted."""
        self.next_key = self._tables.last_key() + 1
        if last_row is not None:
            self._execute("DELETE FROM journal WHERE id > ?", (last_row,))
        return self._rows()

    def _rows(self) -> list[JournalRow]:
        query = "SELECT id, data, keys FROM journal ORDER BY id"
        found: list[JournalRow] = self._execute(query).fetchall()
        return found

    # What the redo asks

    def running_keys(self) -> list[int]:
        """The sessions that ran a request, as stored."""
        query = "SELECT key FROM session WHERE running IS NOT NULL"
        return [key for (key,) in self._execute(query).fetchall()]

    def give_up(self, head: Head, why: str, now_s: float) -> None:
        """Puts a session into quarantine, with as much of its log as there is."""
        if head.tail:
            self._tables.store_tail(head, self.last_row, now_s)
        self.quarantine(head.key, why)
        head.broken = why
        self.heads.pop(head.id, None)
        self.changed.discard(head)
        self._unsaved.drop(head.id)
        logger.error("session %s is in quarantine: %s", head.id, why)

    def head_of_key(self, key: int) -> Head | None:
        """The session, which is among ``heads`` from then on unless it is broken."""
        head = self._tables.head_of_key(key)
        if head is not None and head.broken is None:
            self.heads[head.id] = head
        return head

    def opened_again(
        self, key: int, packed: Any, row: int, rest: Sequence[Any]
    ) -> LoggedEntry | None:
        """A session whose opening has not reached the tables."""
        entry = unpack_entry(packed, None)
        assert isinstance(entry, Opened), entry
        self.next_key = max(self.next_key, key + 1)
        return Head.of(key, entry.value, row - 1), entry, StoredState(*rest[0])


# -------------------------------------------------------------------------------------------------
# Redo of the write-ahead log: what follows from its rows; what cannot be read is skipped.
#
# A line that was altered or is missing costs its session, which is put into quarantine: it
# would continue from another history than its clients have seen. Where not even the sessions
# are known that a row was about, it costs those that ran then and that no later line proves.
# What the database refuses costs its session too (`without_refused`).


L = TypeVar("L", bound=Log)


#: Whether the session with this key is read.
Wanted = Callable[[int], bool]


def everyone(key: int) -> bool:
    """All sessions."""
    return True


def recover(
    log: L, last_row: int | None, held: Iterable[str], now_s: float, is_wanted: Wanted = everyone
) -> L:
    """``log`` with the journal in its heads, within a transaction of the caller's.

    Rows after ``last_row`` are those of a commit that has failed: they go.
    ``held`` are the sessions that the engine has.
    """
    log.last_row = last_row or 0
    redo = Redo(log, now_s, is_wanted)
    for row, data, keys in log.rows_up_to(last_row):
        log.last_row = row
        redo.row(row, unpack_row(data, keys))
    redo.end()
    for head in log.heads.values():
        head.is_held = False
    for id in held:
        if (held_head := log.head(id)) is not None:
            held_head.is_held = True
    return log


class Redo:
    """Brings the heads of a log forward, row by row."""

    def __init__(self, log: Log, now_s: float, is_wanted: Wanted) -> None:
        self._log, self._now_s, self._is_wanted = log, now_s, is_wanted
        self._by_key: dict[int, Head | None] = {}
        self._doubtful: set[Head] = set()
        self._previous: int | None = None

    def row(self, number: int, row: LogRow) -> None:
        """The next one that there is."""
        if self._previous is not None and number != self._previous + 1:
            self._doubt(number)
        self._previous = number
        good, has_bad = self._apply(number, row)
        if row.keys is None:
            if has_bad or not row.is_whole:
                self._doubt(number)
            return
        for key in row.keys - good:
            self._lose(number, key)

    def end(self) -> None:
        """After the last one."""
        for head in self._doubtful:
            if head.broken is None:
                why = "a row of the journal that may have been about it is missing or unreadable"
                self._log.give_up(head, why, self._now_s)

    def _apply(self, number: int, row: LogRow) -> tuple[Counter[int], bool]:
        """Keys of the lines that could be read, and whether there was any other."""
        steps: list[LoggedEntry] = []
        due: set[Head] = set()
        good: Counter[int] = Counter()
        for line in row.lines:
            try:
                step = self._step(line, number)
            except (Malformed, TypeError):
                continue
            good[line.key] += 1
            if step is None:
                continue
            self._doubtful.discard(step[0])
            steps.append(step)
            due |= self._log.advance((step,), number) or set()
            if isinstance(step[1], Deleted):
                due.discard(step[0])
        self._log.apply(steps, due, number, self._now_s)
        return good, good.total() < len(row.lines)

    def _step(self, line: Line, number: int) -> LoggedEntry | None:
        """What a line means; None if its session is gone, or has it in its tables.

        Raises `Malformed` and `TypeError` for a line that was altered.
        """
        if not self._is_wanted(line.key):
            return None
        head = self._head(line.key)
        if head is None and line.entry[0] == "opened":
            _check(line, 0)
            opened = self._log.opened_again(line.key, line.entry, number, line.rest)
            self._by_key[line.key] = opened and opened[0]
            return opened
        if head is None or number <= head.journal:
            return None
        if head.broken is not None and line.entry[0] != "deleted":
            return None
        if head.broken is None:
            _check(line, head.num_entries)
        if line.entry[0] == "opened":
            raise Malformed("the session is there already")
        entry: Entry = unpack_entry(line.entry, head.running)
        return head, entry, None

    def _head(self, key: int) -> Head | None:
        if key not in self._by_key:
            self._by_key[key] = self._log.head_of_key(key)
        return self._by_key[key]

    def _lose(self, number: int, key: int) -> None:
        if not self._is_wanted(key):
            return
        head = self._head(key)
        if head is None:
            logger.error("row %d of the journal: the beginning of a session is lost", number)
        elif head.broken is None and number > head.journal:
            why = f"its entry in row {number} of the journal was altered"
            self._log.give_up(head, why, self._now_s)

    def _doubt(self, number: int) -> None:
        """Any session that ran before row ``number`` may miss an entry."""
        logger.error("rows of the journal before %d, or this one, cannot be read", number)
        keys = {*self._log.running_keys(), *self._by_key}
        found = (self._head(key) for key in keys if self._is_wanted(key))
        self._doubtful |= {head for head in found if head is not None and head.running is not None}


def _check(line: Line, number: int) -> None:
    if not line.is_entry(number):
        raise Malformed("the line was altered")


def without_refused(
    database: Database,
    refusals: tuple[type[Exception], ...],
    read: Callable[[Wanted], L],
    now_s: float,
) -> L:
    """The log after all of a journal that the database takes, in a transaction of the caller's.

    ``read`` reads the journal into a log that knows nothing yet, for the sessions that are
    wanted. Where the database refuses data (``refusals``), the sessions of the journal are
    halved until those at fault are alone: these are put into quarantine, and no others.
    """
    logger.error("reading the journal session by session")
    none = read(lambda key: False)

    def refused(keys: Sequence[int]) -> list[int]:
        """Brings the tables up to the journal for ``keys``; those for which that is refused."""
        if not keys:
            return []
        try:
            with database.savepoint():
                log = read(frozenset(keys).__contains__)
                tails = [head for head in log.heads.values() if head.tail]
                log.store_tails(tails, log.last_row, now_s)
                return []
        except refusals as error:
            if len(keys) == 1:
                name = none.quarantine(keys[0], brief(error))
                logger.error("session %s is in quarantine: %s", name, brief(error))
                return list(keys)
        half = len(keys) // 2
        return refused(keys[:half]) + refused(keys[half:])

    at_fault = frozenset(refused(sorted(none.keys_of_journal())))
    return read(lambda key: key not in at_fault)
