"""The log of all sessions: a journal with one row for each commit, and what follows from it.

A commit is one row, written and synced by itself: that row is the whole truth
about it. The other tables are brought up to it right after, without a sync of
their own, because whatever of that is lost is done over from the journal.

Tokens are most of what there is, so that each loop deals with them first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from server.engine.types import Finished, TokenEvent
from server.engine.value import Accepted, Deleted, Entry, Opened, Record, Rewound, Saved
from server.store.codec import unpack_entry
from server.store.database import Database
from server.store.errors import StoreLost
from server.store.heads import Head
from server.store.log_rows import LoggedEntry, StoredState, pack_row, unpack_row
from server.store.snapshots import SnapshotRow, Snapshots, Unsaved
from server.store.tables import Tables

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

    # What `server.store.redo` asks

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
