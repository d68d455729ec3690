"""The log of the sessions that one replica holds, in a store that it shares with others.

Each replica has a journal of its own. A session without an owner has no entries in any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from server.engine.session import Entry, Opened
from server.store.base import Fenced, SessionBroken, StoreLost
from server.store.codec import running_after, unpack_entry
from server.store.log import COUNTED, JournalRow, Log, LoggedEntry, StoredState, unpack_row
from server.store.postgres.database import FENCED, PostgresDatabase
from server.store.rows import COLUMNS, Head, Tables
from server.store.snapshots import Snapshots, Unsaved

#: Fewer than the embedded store has: a take-over reads them all at once.
MAX_JOURNAL_ROWS = 512
#: Sessions that a replica can make: the other bits of their keys are its own key.
KEY_BITS = 32

LOST = "the database has lost what this replica had committed"

_APPEND = "SELECT append_journal(?, ?, ?, ?, ?, ?, ?)"
_AWAY = f"SELECT holder, {COLUMNS} FROM session WHERE id = ?"  # noqa: S608
_HELD = f"SELECT {COLUMNS} FROM session WHERE holder = ?"  # noqa: S608
_OPENED = "SELECT key FROM session WHERE key >= ? AND key < ?"
_TAKE = f"""
    UPDATE session SET holder = ?, sum = sum + (? - journal), journal = ?
    WHERE id = ? AND owner = ? AND holder IS NULL RETURNING {COLUMNS}
"""  # noqa: S608


class SharedLog(Log):
    """``heads`` are the sessions that the replica ``me`` holds, and no others."""

    max_journal_rows = MAX_JOURNAL_ROWS

    def __init__(
        self,
        database: PostgresDatabase,
        tables: Tables,
        snapshots: Snapshots,
        unsaved: Unsaved,
        me: int,
    ) -> None:
        super().__init__(database, tables, snapshots, unsaved)
        self._shared, self._me = database, me
        self._held_keys: dict[int, Head] = {}
        self.next_key = (me << KEY_BITS) + 1
        self.now_s = 0.0

    def head(self, session: str) -> Head | None:
        """One that this replica holds."""
        return self.heads.get(session)

    # Whose a session is; within a transaction of the caller's

    def take(self, session: str, owner: str) -> Head | None:
        """Gives a session of ``owner`` that no replica holds to this one."""
        # The rows of the journal that it came through were another replica's.
        for row in self._execute(_TAKE, (self._me, self.last_row, self.last_row, session, owner)):
            head = Head.read(row)
            self.heads[head.id] = head
            return head
        return None

    def disown(self, heads: Iterable[Head]) -> None:
        """Gives up ``heads``, whose entries must all be in the tables."""
        gone = list(heads)
        assert not any(head.tail for head in gone), gone
        keys = [head.key for head in gone]
        query = "UPDATE session SET holder = NULL WHERE key = ANY(?) AND holder = ?"
        self._execute(query, (keys, self._me))
        for head in gone:
            self.heads.pop(head.id, None)
            self.changed.discard(head)

    def away(self, session: str) -> tuple[int | None, Head] | None:
        """A session that this replica does not hold, as its tables are, and who holds it."""
        for holder, *row in self._execute(_AWAY, (session,)):
            return holder, Head.read(row)
        return None

    def entries_away(self, holder: int | None, head: Head) -> Iterator[Entry]:
        """What the journal of its holder has of a session, beyond its tables."""
        if holder is None:
            return
        query = "SELECT data, keys FROM journal WHERE replica = ? AND id > ? ORDER BY id"
        running, number = head.running, head.num_entries
        for data, keys in self._execute(query, (holder, head.journal)).fetchall():
            for line in unpack_row(data, keys).of(head.key):
                if not line.is_entry(number):
                    raise SessionBroken
                entry = unpack_entry(line.entry, running)
                number += isinstance(entry, COUNTED)
                running = running_after(entry, running)
                yield entry

    # What differs from a log that has the store for itself

    def _insert_row(self, data: bytes, keys: str, steps: Sequence[LoggedEntry]) -> None:
        """One round trip, unless sessions are new: they are in the tables at once.

        So no journal can bring one back that others have deleted meanwhile.
        """
        new = {step[0]: step for step in steps if isinstance(step[1], Opened)}
        held = {head.key for head, _, _ in steps if head not in new}
        held_keys = "{" + ",".join(map(str, held)) + "}"  # quicker than the library's own list
        shared = self._shared
        number = self.last_row + 1
        row = (self._me, shared.link, number, data, keys, held_keys, shared.is_full)
        if not new:
            _check(self._shared.call("append_journal", row))
            return
        with self._shared.transaction():
            appended = self._execute(_APPEND, row)
            for head, (_, entry, kept) in new.items():
                assert isinstance(entry, Opened), entry
                super()._add_session(head, entry, kept, self.now_s)
            query = "UPDATE session SET holder = ? WHERE key = ANY(?)"
            self._execute(query, (self._me, [head.key for head in new]))
            _check(appended.fetchall()[0][0])

    def _add_session(
        self, head: Head, entry: Opened, kept: StoredState | None, now_s: float
    ) -> None:
        """That has been done with the commit."""

    def head_of_key(self, key: int) -> Head | None:
        return self._held_keys.get(key)

    def running_keys(self) -> list[int]:
        return [key for key, head in self._held_keys.items() if head.running is not None]

    def opened_again(
        self, key: int, packed: Any, row: int, rest: Sequence[Any]
    ) -> LoggedEntry | None:
        return None  # it is gone, or no longer this replica's

    def _drop_rows_before(self, row: int) -> None:
        self._execute("DELETE FROM journal WHERE replica = ? AND id < ?", (self._me, row))

    def rows_up_to(self, last_row: int | None) -> list[JournalRow]:
        if last_row is not None:
            self._undo_opened()
        for row in self._execute(_HELD, (self._me,)).fetchall():
            head = Head.read(row)
            if head.broken is not None:
                self.quarantine(head.key, head.broken)
                continue
            self.heads[head.id] = self._held_keys[head.key] = head
        if last_row is not None:
            self._execute("DELETE FROM journal WHERE replica = ? AND id > ?", (self._me, last_row))
        found = self._rows()
        if last_row and (not found or found[-1][0] != last_row):
            raise Fenced(LOST)
        return found

    def _rows(self) -> list[JournalRow]:
        query = "SELECT id, data, keys FROM journal WHERE replica = ? ORDER BY id"
        found: list[JournalRow] = self._execute(query, (self._me,)).fetchall()
        return found

    def quarantine(self, key: int, why: str) -> str:
        """See `Log.quarantine`. It has no holder from then on."""
        self._execute("UPDATE session SET holder = NULL WHERE key = ?", (key,))
        return super().quarantine(key, why)

    def _undo_opened(self) -> None:
        """Of a commit that has failed for this process, and perhaps not for the database."""
        unknown = (self.next_key, (self._me + 1) << KEY_BITS)
        for (key,) in self._execute(_OPENED, unknown).fetchall():
            self._tables.delete_session(key, self.now_s)


def _check(result: int) -> None:
    if result == 1:
        raise Fenced(FENCED)
    if result == 2:
        raise StoreLost("another replica has one of these sessions")
    if result == 3:
        raise Fenced(LOST)
