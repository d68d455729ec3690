"""What the store's tables are asked and told, in both databases, and the heads of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from server.engine.session import Accepted, Entry, Opened, Rewound, Saved, SessionValue
from server.engine.types import Finished, TokenEvent
from server.store.base import Keyed, SessionBroken, StoreTooNew
from server.store.codec import (
    Malformed,
    build,
    decode_json,
    encode,
    pack_entries,
    row_sum,
    running_after,
    unpack_entries,
)

# -------------------------------------------------------------------------------------------------
# Where a session of the log is now, and its newest entries: kept in memory until there are many.
#
# One row for each session and tick would touch a page of the database for each; the
# journal takes one row for all of them, and a session's entries reach a row of
# their own some hundred at a time.


#: What a row of the table has of a `Head`, in the order of its fields, and its checksum.
COLUMNS = "key, id, owner, epoch, length, seq, running, num_entries, log_seq, journal, broken, sum"


@dataclass(eq=False, slots=True)
class Head:
    """A session after its last entry.

    ``tail`` are the entries from number ``num_stored`` on, the first of which came
    with row ``tail_journal`` of the journal; ``tail_running`` is the request before
    them. Events up to ``log_seq`` are no longer in the log. ``is_held`` while the
    engine has the session. One that is ``broken``, and why, is in quarantine.
    """

    key: int
    id: str
    owner: str
    epoch: int
    length: int
    seq: int
    running: str | None
    num_stored: int
    log_seq: int
    journal: int
    broken: str | None = None
    tail: list[Entry] = field(default_factory=list)
    tail_journal: int = 0
    tail_running: str | None = None
    is_held: bool = False

    @classmethod
    def of(cls, key: int, value: SessionValue, journal: int) -> Head:
        """A session that begins as ``value``; its entries will come after row ``journal``."""
        running = running_after(Opened(value), None)
        return cls(
            key,
            value.id,
            value.owner,
            value.epoch,
            value.length,
            value.seq,
            running,
            0,
            value.seq,
            journal,
            tail_running=running,
        )

    @classmethod
    def read(cls, row: Sequence[Any]) -> Head:
        """The session of a row of the table; ``broken`` where the row was altered."""
        *fields, stored = row
        head = cls(*fields)
        if head.broken is None and stored != head.sum:
            head.broken = "its row was altered"
        return head

    @property
    def sum(self) -> int:
        """The checksum of the table's row, of what is stored.

        The number of the write-ahead log's row is added: where it alone changes, SQL can do so too.
        """
        return self.journal + row_sum(
            *(self.key, self.id, self.owner, self.epoch, self.length, self.seq),
            *(self.running, self.num_stored),
        )

    @property
    def num_entries(self) -> int:
        return self.num_stored + len(self.tail)

    def add_token(self, entry: TokenEvent, journal: int) -> int:
        """See `add`; returns how long the tail is now."""
        tail = self.tail
        if not tail:
            self.tail_journal, self.tail_running = journal, self.running
        tail.append(entry)
        self.running, self.seq, self.length = entry[0], entry[1], entry[2] + 1
        self.is_held = True
        return len(tail)

    def add(self, entry: Entry, journal: int) -> None:
        """Brings the session forward by ``entry``, which came with row ``journal``."""
        if isinstance(entry, TokenEvent):
            self.add_token(entry, journal)
            return
        self.is_held = not (isinstance(entry, Saved) and entry.evicted)
        if not self.tail:
            self.tail_journal, self.tail_running = journal, self.running
        self.running = running_after(entry, self.running)
        self.length = length_after(entry, self.length)
        if isinstance(entry, Accepted | Finished):
            self.tail.append(entry)
            self.seq = entry.seq
        elif isinstance(entry, Rewound | Saved):
            self.epoch, self.seq = entry.value.epoch, entry.value.seq
            if isinstance(entry, Rewound):
                self.tail.append(as_logged(entry))


def length_after(entry: Entry, length: int) -> int:
    """Tokens of text after ``entry``, where there were ``length`` before it."""
    match entry:
        case TokenEvent():
            return entry.position + 1
        case Accepted():
            return entry.length + len(entry.tokens)
        case Finished():
            return entry.position  # shorter where it was cancelled within its prompt
        case Rewound():
            return entry.value.length
    return length


def num_tokens(entry: Entry) -> int:
    """What ``entry`` counts for where a log may have so many tokens."""
    return len(entry.tokens) if isinstance(entry, Accepted) else 1


def total_tokens(entries: Sequence[Entry]) -> int:
    """The sum of `num_tokens`."""
    prompts = (len(entry.tokens) - 1 for entry in entries if type(entry) is Accepted)
    return len(entries) + sum(prompts)


def as_logged(entry: Entry) -> Entry:
    """``entry`` as the log keeps it: states live in snapshots."""
    if isinstance(entry, Rewound):
        return Rewound(replace(entry.value, state=None))
    return entry


# -------------------------------------------------------------------------------------------------
# What both databases have: the way to ask them, the tables, and the formats that are known.
#
# Each database adds what it alone has: `server.store.sqlite.database` and
# `server.store.postgres.database`. Checksums are described in `server.store.codec`.


class Database(Protocol):
    """A connection. Statements have a question mark for each parameter."""

    @property
    def execute(self) -> Callable[..., Any]: ...
    def transaction(self, synced: bool = True) -> AbstractContextManager[None]: ...
    def savepoint(self) -> AbstractContextManager[None]: ...
    def set_meta(self, name: str, value: object) -> None: ...


#: For `str.format`, with the names of types; ``end`` and ``end_by_key`` follow lists of columns.
TABLES = """
    CREATE TABLE identity (key {row_key}, fields {text} NOT NULL UNIQUE){end};

    -- As it was after the commit of number `journal`. Times are seconds of the store's clock.
    -- `broken` is why a session is in quarantine.
    CREATE TABLE session (
        key {session_key},
        id {text} NOT NULL UNIQUE,
        owner {text} NOT NULL,
        epoch {integer} NOT NULL,
        length {integer} NOT NULL,
        seq {integer} NOT NULL,
        running {text},
        num_entries {integer} NOT NULL,
        log_seq {integer} NOT NULL,
        log_tokens {integer} NOT NULL DEFAULT 0,
        bytes {integer} NOT NULL DEFAULT 0,
        journal {integer} NOT NULL,
        created_s {real} NOT NULL,
        used_s {real} NOT NULL,
        broken {text},
        sum {integer} NOT NULL
    ){end};
    CREATE INDEX session_owner ON session (owner, id);
    CREATE INDEX session_used ON session (used_s);
    CREATE INDEX session_running ON session (id) WHERE running IS NOT NULL;

    -- Entries `first` <= number < `end` of a session's log; `running` is the request before them.
    CREATE TABLE segment (
        session {integer} NOT NULL,
        first {integer} NOT NULL,
        "end" {integer} NOT NULL,
        last_seq {integer} NOT NULL,
        num_tokens {integer} NOT NULL,
        running {text},
        data {blob} NOT NULL,
        sum {integer} NOT NULL,
        PRIMARY KEY (session, first)
    ){end};

    -- A value, before the entry of number `place`. The state is in `file`, if there is one.
    CREATE TABLE snapshot (
        key {row_key},
        session {integer} NOT NULL,
        place {integer} NOT NULL,
        length {integer} NOT NULL,
        identity {integer} NOT NULL,
        value {text} NOT NULL,
        file {text},
        bytes {integer} NOT NULL,
        sum {integer} NOT NULL
    ){end};
    CREATE INDEX snapshot_session ON snapshot (session);
    CREATE INDEX snapshot_file ON snapshot (file) WHERE file IS NOT NULL;

    -- `gone_s` is when the session was deleted. `note` came with the request, and is kept for as
    -- long as its session.
    CREATE TABLE request_key (
        owner {text} NOT NULL,
        key {text} NOT NULL,
        session {integer} NOT NULL,
        session_id {text} NOT NULL,
        request_id {text} NOT NULL,
        first_seq {integer} NOT NULL,
        length {integer} NOT NULL,
        is_append {integer} NOT NULL,
        finished {text},
        gone_s {real},
        note {text},
        sum {integer} NOT NULL,
        note_sum {integer},
        PRIMARY KEY (owner, key)
    ){end_by_key};
    CREATE INDEX request_key_session ON request_key (session);
    CREATE INDEX request_key_gone ON request_key (gone_s) WHERE gone_s IS NOT NULL;
"""

#: From format 1 to format 2: a snapshot within a prompt leads to shorter texts than its own. Rows
#: of format 1 have the length of their texts there, and so are found for no shorter one.
SECOND = "ALTER TABLE snapshot RENAME COLUMN length TO min_length"

#: From format 2 to format 3: logged requests may have `SamplingParams.top_n_sigma`, which a version
#: that knows format 2 refuses. The tables are the same, and a log without it is read as before.
THIRD = "SELECT 3"

#: From format 3 to format 4: the same of `SamplingParams.dry` and of XTC.
FOURTH = "SELECT 4"


def refuse_unknown(version: int, newest: int, store: str, place: str) -> None:
    """Raises `StoreTooNew` unless a ``store`` has a format from 0, no tables, to ``newest``.

    ``place`` is what the operator can name instead.
    """
    if not 0 <= version <= newest:
        raise StoreTooNew(
            f"{store} has format {version}, and this version of everstream knows "
            f"{newest}: use a newer one, or another {place}"
        )


# -------------------------------------------------------------------------------------------------
# What the store's tables are asked and told about sessions, their logs and their keys.


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
