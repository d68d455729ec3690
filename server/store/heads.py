"""Where a session of the log is now, and its newest entries: kept in memory until there are many.

One row for each session and tick would touch a page of the database for each; the
journal takes one row for all of them, and a session's entries reach a row of
their own some hundred at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from server.engine.types import Finished, TokenEvent
from server.engine.value import Accepted, Entry, Opened, Rewound, Saved, SessionValue
from server.store.codec import row_sum, running_after

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
