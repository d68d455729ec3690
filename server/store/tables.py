"""What the store's tables are asked and told about sessions, their logs and their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from server.engine.types import Finished
from server.engine.value import Accepted, Entry
from server.store.base import Keyed
from server.store.codec import (
    Malformed,
    build,
    decode_json,
    encode,
    pack_entries,
    row_sum,
    unpack_entries,
)
from server.store.database import Database
from server.store.errors import SessionBroken
from server.store.heads import COLUMNS, Head, total_tokens

_HEAD_BY_ID = f"SELECT {COLUMNS} FROM session WHERE id = ?"  # noqa: S608
_HEAD_BY_KEY = _HEAD_BY_ID.replace("WHERE id", "WHERE key")
_LIST = (
    "SELECT id, owner, epoch, length, seq, running, bytes FROM session "
    "WHERE id > ? ORDER BY id LIMIT ?"
)
_LIST_OF_OWNER = _LIST.replace("WHERE", "WHERE owner = ? AND")
_BEGIN_KEY = """
    INSERT INTO request_key
        (owner, key, session, session_id, request_id, first_seq, length, is_append, note, sum,
         note_sum)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (owner, key) DO UPDATE SET
        session = excluded.session, session_id = excluded.session_id,
        request_id = excluded.request_id, first_seq = excluded.first_seq,
        length = excluded.length, is_append = excluded.is_append, note = excluded.note,
        finished = NULL, gone_s = NULL, sum = excluded.sum, note_sum = excluded.note_sum
"""
#: What `is_key_altered` wants of a request's key.
KEYS = (
    "SELECT owner, key, session, session_id, request_id, first_seq, length, is_append, finished, "
    "note, sum, note_sum FROM request_key"
)
SEGMENTS = 'SELECT first, "end", last_seq, running, data, sum FROM segment WHERE session = ? '


class LogSegment(NamedTuple):
    """A row of a session's log: the entries ``first`` <= number < ``end``."""

    first: int
    end: int
    last_seq: int
    running: str | None
    data: bytes
    sum: int

    def entries(self, key: int) -> list[Entry]:
        """All of them, of the session ``key``. Raises `SessionBroken` where the row was altered."""
        place = (key, self.first, self.end, self.last_seq, self.running)
        if self.sum != row_sum(*place, data=self.data):
            raise SessionBroken
        try:
            return unpack_entries(self.data, self.running)
        except (Malformed, TypeError) as error:
            raise SessionBroken from error


class Tables:
    """Rows of one database; transactions are the caller's."""

    def __init__(self, database: Database) -> None:
        self._execute: Callable[..., Any] = database.execute

    # Sessions

    def head(self, session: str) -> Head | None:
        """The session as its last segment left it."""
        for row in self._execute(_HEAD_BY_ID, (session,)):
            return Head.read(row)
        return None

    def head_of_key(self, key: int) -> Head | None:
        for row in self._execute(_HEAD_BY_KEY, (key,)):
            return Head.read(row)
        return None

    def last_key(self) -> int:
        """The highest key that a session has ever had."""
        for (key,) in self._execute("SELECT seq FROM sqlite_sequence WHERE name = 'session'"):
            return int(key)
        return 0

    def add_session(self, head: Head, now_s: float) -> None:
        """A new row."""
        self._execute(
            "INSERT INTO session (key, id, owner, epoch, length, seq, running, num_entries, "
            "log_seq, journal, created_s, used_s, sum) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(head.key, head.id, head.owner, head.epoch, head.length, head.seq),
                *(head.running, 0, head.log_seq, head.journal, now_s, now_s, head.sum),
            ),
        )

    def delete_session(self, key: int, now_s: float) -> None:
        """Everything but its request keys: what was done is not done again."""
        self._execute("DELETE FROM session WHERE key = ?", (key,))
        self._execute("DELETE FROM segment WHERE session = ?", (key,))
        self._execute("DELETE FROM snapshot WHERE session = ?", (key,))
        query = "UPDATE request_key SET gone_s = ?, note = NULL WHERE session = ?"
        self._execute(query, (now_s, key))

    def quarantine(self, key: int, why: str) -> None:
        """The session cannot continue: part of its log is unusable."""
        query = "UPDATE session SET broken = ?, running = NULL WHERE key = ?"
        self._execute(query, (why, key))

    def touch(self, key: int, now_s: float) -> None:
        """The session has been used."""
        self._execute("UPDATE session SET used_s = ? WHERE key = ?", (now_s, key))

    def grow(self, key: int, num_bytes: int, num_tokens: int = 0) -> None:
        """Counts what the session takes up."""
        self._execute(
            "UPDATE session SET bytes = bytes + ?, log_tokens = log_tokens + ? WHERE key = ?",
            (num_bytes, num_tokens, key),
        )

    def listed(
        self, owner: str | None, after: str | None, limit: int
    ) -> Iterator[tuple[str, str, int, int, int, str | None, int]]:
        """Id, owner, epoch, length, seq, running request and bytes, as stored."""
        if owner is None:
            yield from self._execute(_LIST, (after or "", limit))
        else:
            yield from self._execute(_LIST_OF_OWNER, (owner, after or "", limit))

    def unfinished(self) -> dict[str, str]:
        """The owner of each session whose request had not ended, as stored."""
        query = "SELECT id, owner FROM session WHERE running IS NOT NULL"
        return dict(self._execute(query).fetchall())

    def unused_since(self, before_s: float, limit: int) -> list[str]:
        """Sessions that run nothing and have not been used since."""
        query = "SELECT id FROM session WHERE used_s < ? AND running IS NULL LIMIT ?"
        return [id for (id,) in self._execute(query, (before_s, limit))]

    def stored_bytes(self, owner: str) -> int:
        """Of all sessions of ``owner``."""
        query = "SELECT coalesce(sum(bytes), 0) FROM session WHERE owner = ?"
        return int(self._execute(query, (owner,)).fetchone()[0])

    # Logs

    def store_tail(self, head: Head, journal: int, now_s: float) -> None:
        """The tail becomes a segment; row ``journal`` of the journal has nothing more for it."""
        count, num_bytes = total_tokens(head.tail), 0
        if head.tail:
            data = pack_entries(head.tail, head.tail_running)
            num_bytes = len(data)
            place = (head.key, head.num_stored, head.num_entries, head.seq)
            self._execute(
                "INSERT INTO segment VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(*place, count, head.tail_running, data),
                    row_sum(*place, head.tail_running, data=data),
                ),
            )
        head.num_stored, head.tail, head.journal = head.num_entries, [], journal
        self._execute(
            "UPDATE session SET epoch = ?, length = ?, seq = ?, running = ?, num_entries = ?, "
            "log_tokens = log_tokens + ?, bytes = bytes + ?, journal = ?, used_s = ?, sum = ? "
            "WHERE key = ?",
            (
                *(head.epoch, head.length, head.seq, head.running, head.num_stored),
                *(count, num_bytes, journal, now_s, head.sum, head.key),
            ),
        )

    def entries(self, head: Head, place: int) -> list[Entry]:
        """The entries from number ``place`` on. Raises `SessionBroken` without all of them."""
        found = list(self.numbered(head, place))
        if place < head.num_entries and (not found or found[0][0] != place):
            raise SessionBroken
        return [entry for _, entry in found]

    def entries_after(self, head: Head, seq: int) -> Iterator[Entry]:
        """The entries that may have an event after ``seq``. Raises as `numbered`."""
        for segment in self._segments(head, "last_seq > ?", seq):
            yield from segment.entries(head.key)
        yield from head.tail

    def numbered(self, head: Head, place: int) -> Iterator[tuple[int, Entry]]:
        """The entries from number ``place`` on that are there; read as they are taken.

        Raises `SessionBroken` where some of them were altered, or are missing in between.
        """
        for segment in self._segments(head, '"end" > ?', place):
            found = enumerate(segment.entries(head.key), segment.first)
            yield from (each for each in found if each[0] >= place)
        found = enumerate(head.tail, head.num_stored)
        yield from (each for each in found if each[0] >= place)

    def _segments(self, head: Head, condition: str, value: int) -> Iterator[LogSegment]:
        """In their order up to the tail, read as they are taken; raises where one is missing."""
        end: int | None = None
        query = f"{SEGMENTS} AND {condition} ORDER BY first"
        with closing(self._execute(query, (head.key, value))) as rows:
            for row in rows:
                segment = LogSegment(*row)
                if end not in (None, segment.first):
                    raise SessionBroken
                yield segment
                end = segment.end
        if end not in (None, head.num_stored):
            raise SessionBroken

    def log_tokens(self, keys: Iterable[int]) -> list[int]:
        """Tokens in the segments of each session, all in one round trip."""
        query = "SELECT log_tokens FROM session WHERE key = ?"
        asked = [self._execute(query, (key,)) for key in keys]
        rows = [found.fetchone() for found in asked]
        return [0 if row is None else int(row[0]) for row in rows]

    def drop_segments(self, head: Head, num_tokens: int, needed: int) -> int:
        """Drops old segments of at least ``num_tokens`` together, if entry ``needed`` stays.

        Returns the number of the first entry that is left.
        """
        query = (
            'SELECT "end", last_seq, num_tokens, length(data) FROM segment '
            'WHERE session = ? AND "end" <= ? ORDER BY first'
        )
        first = dropped = num_bytes = 0
        for end, last_seq, count, size in self._execute(query, (head.key, needed)).fetchall():
            if dropped >= num_tokens:
                break
            first, dropped, num_bytes = end, dropped + count, num_bytes + size
            head.log_seq = last_seq
        query = 'DELETE FROM segment WHERE session = ? AND "end" <= ?'
        self._execute(query, (head.key, first))
        query = "UPDATE session SET log_seq = ? WHERE key = ?"
        self._execute(query, (head.log_seq, head.key))
        self.grow(head.key, -num_bytes, -dropped)
        return first

    # Keys

    def begin_key(self, head: Head, entry: Accepted) -> None:
        """A request came under its client's key."""
        request = entry.request
        columns = (
            *(head.owner, request.key, head.key, head.id, request.request_id),
            *(entry.seq, entry.length, int(request.sampling is None)),
        )
        note_sum = None if request.note is None else row_sum(request.note)
        self._execute(_BEGIN_KEY, (*columns, request.note, row_sum(*columns), note_sum))
        if request.note is not None:
            self.grow(head.key, len(request.note))

    def end_key(self, head: Head, entry: Finished) -> None:
        """The session's request has ended, whatever it is called by now."""
        finished = encode(entry).decode()
        self._execute(
            "UPDATE request_key SET finished = ?, sum = sum + ? "
            "WHERE session = ? AND finished IS NULL",
            (finished, row_sum(finished), head.key),
        )

    def forget_keys(self, before_s: float) -> None:
        """Those of sessions that were deleted before."""
        self._execute("DELETE FROM request_key WHERE gone_s < ?", (before_s,))

    def find_key(self, owner: str, key: str) -> Keyed | None:
        for row in self._execute(KEYS + " WHERE owner = ? AND key = ?", (owner, key)):
            if is_key_altered(row):
                raise SessionBroken("what was done under this key cannot be read", "key")
            _, _, _, session, request, seq, length, is_append, finished, note, *_ = row
            ended = None if finished is None else build(Finished, decode_json(finished))
            return Keyed(session, request, seq, length, ended, bool(is_append), note)
        return None


def is_key_altered(row: Sequence[Any]) -> bool:
    """Whether a row of the keys is not as it was written."""
    *fields, finished, note, stored, note_sum = row
    if note is not None and note_sum != row_sum(note):
        return True
    ended = 0 if finished is None else row_sum(finished)
    return bool(stored != row_sum(*fields) + ended)
