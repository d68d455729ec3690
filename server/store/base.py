"""What the server asks of a store of sessions, and what it gets back.

One thread calls it, and every call blocks until it is done. What `Store.commit`
has returned from is in the log for good, so that it may be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from model.tensor_spec import POSITION_BLOCK
from server.engine.types import Finished, TokenEvent
from server.engine.value import Entry, Record, SessionValue
from server.store.files import Chunk

#: The fields of an `Identity` that are numbers.
NUMBERS = ("state_bytes", "group_bytes", "context")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a state belongs to: a session continues from it only if its `labels` are equal.

    ``layout`` is a digest of the shapes and order of the parts of a state. Without a past it has
    ``state_bytes`` bytes. One with a bounded past of ``context`` positions has ``group_bytes``
    more for each `POSITION_BLOCK` of them that it has seen.
    """

    model: str
    tokenizer: str
    backend: str
    dtype: str
    state_bytes: int
    layout: str
    group_bytes: int = 0
    past: str = "stop"
    context: int = 0

    @property
    def labels(self) -> dict[str, str]:
        """The fields that decide what a state means, as strings.

        A bound at which texts stop is not among them: a state is the same for all of them.
        """
        named = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        if not self.group_bytes:
            del named["group_bytes"]
        if self.past == "stop":
            del named["past"], named["context"]
        return named

    @classmethod
    def of(cls, about: Mapping[str, str]) -> Identity:
        """The one with these labels, of which there may be others. Raises KeyError, ValueError."""
        texts = {field.name: about[field.name] for field in fields(cls) if field.name in about}
        numbers = {name: int(texts[name]) for name in NUMBERS if name in texts}
        try:
            return cls(**{**texts, **numbers})  # type: ignore[arg-type]
        except TypeError as error:
            raise KeyError("a label is missing") from error

    def used_bytes(self, position: int) -> int:
        """Of a state that has seen ``position`` tokens: see `model.state.StateLayout`."""
        seen = min(position, self.context) if self.context else position
        return self.state_bytes + self.group_bytes * -(-seen // POSITION_BLOCK)

    @property
    def max_bytes(self) -> int:
        """Of a state with as much of a past as it may have."""
        return self.used_bytes(self.context)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A session's value at a snapshot, and the entries after it, in order.

    Among ``entries`` are `Accepted`, `TokenEvent`, `Finished` and `Rewound` alone;
    the value of a `Rewound` has no state here.
    """

    value: SessionValue
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Keyed:
    """The request that came under a client's key, and how it ended, once it has.

    The session had ``first_seq`` events and ``length`` tokens before it;
    ``is_append`` where it only fed tokens. ``note`` is the request's, as long as
    there is its session.
    """

    session: str
    request_id: str
    first_seq: int
    length: int
    finished: Finished | None
    is_append: bool
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """A session in a list. ``unfinished``: its last request has not ended."""

    id: str
    owner: str
    epoch: int
    length: int
    seq: int
    unfinished: bool
    stored_bytes: int


Found = list[Listed]
Events = list[TokenEvent | Finished]
#: Entries of a session's log with their numbers, which count up by one.
Numbered = list[tuple[int, Entry]]


class Store(Protocol):
    """Keeps sessions. Owned by one thread."""

    @property
    def store_id(self) -> str:
        """Random hex digits, made with the store: another id is another history."""

    @property
    def durable(self) -> bool:
        """Whether sessions can be evicted to it."""

    def commit(self, records: Sequence[Record]) -> None:
        """Adds records, in order. A state may reach the disk later than its `Saved`.

        Raises `StoreFull`, `StoreFailed`, `Fenced`, `StoreLost` (records of a session that
        the store does not have) or `RecordRefused` (something that the database does not take),
        and then none of the records counts. The last two are for one of the sessions alone.
        """

    def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
        """The newest valid snapshot that leads to ``at`` tokens of text, and what came after it.

        The entries lead to the present, or at least past ``at`` tokens of text, where those of the
        value, which then was within a prompt, are not more already.
        Raises `SessionNotFound` (unknown, deleted or another owner's), `SessionBroken`,
        `SnapshotMismatch`, `SnapshotBroken` or `HistoryGone`.
        """

    def read(self, session: str, owner: str, after_seq: int, max_events: int) -> Events:
        """The events after ``after_seq`` that count in ``seq``, at most ``max_events``.

        Raises `SessionNotFound`, `SessionBroken` or `HistoryGone`.
        """

    def discard(self, session: str, owner: str) -> None:
        """Deletes a session in quarantine. Raises `SessionNotFound`."""

    def entries(self, session: str, owner: str, place: int, max_entries: int) -> Numbered:
        """The log's entries from number ``place`` on, or from the first one that is kept.

        Raises `SessionNotFound` or `SessionBroken`.
        """

    def log_end(self, session: str, owner: str) -> int:
        """The number that the next entry of the log gets. Raises as `entries` does."""

    def find_key(self, owner: str, key: str) -> Keyed | None:
        """The request that came under ``key``, also where its session is gone by now."""

    def list(self, owner: str | None, after: str | None, limit: int) -> Found:
        """Sessions by id, beginning after ``after``; of every owner where None is given."""

    def unfinished(self) -> Sequence[tuple[str, str]]:
        """(session, owner) of each session whose last request has not ended."""

    def stored_bytes(self, owner: str) -> int:
        """Bytes of the sessions of ``owner``."""

    def named_states(self) -> dict[str, str]:
        """The digest of each named state by its name. No session depends on them."""

    def read_named(self, name: str) -> bytes | None:
        """The file of a named state, if there is one."""

    def put_named(self, name: str, digest: str, parts: Sequence[Chunk]) -> None:
        """Stores the file of a named state durably, and replaces one of the same name.

        Raises `StoreFull` or `StoreFailed`; then the old one is still there.
        """

    def drop_named(self, name: str) -> bool:
        """Deletes a named state; whether there was one."""

    def maintain(self, now_s: float) -> bool:
        """Retention, pruning, syncing, heartbeat: about once a second, ``now_s`` monotonic.

        Returns whether there is more to do, for which it is to be called again soon.
        Raises what `commit` raises.
        """

    def forget(self) -> None:
        """The engine has discarded all of its sessions, after a commit that failed."""

    def close(self) -> None:
        """Writes what is pending and closes the store."""
