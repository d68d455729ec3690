"""A session as a value, and the entries of the log that it can be rebuilt from.

A value is all that a continuation depends on. `Saved` puts one into the log, and
the entries after it lead to the present: `server.engine.replay` folds them in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from server.engine.turn_text import TurnState
from server.engine.types import Finished, Request, TokenEvent


class StoredFile:
    """Where a store keeps a state: its ``name``, once it does. Copies of a state share this."""

    __slots__ = ("name",)

    def __init__(self) -> None:
        self.name: str | None = None


class StateBlock:
    """The state of one session, outside the pool: immutable, so that any number share it.

    ``source`` is its bytes, or ``num_bytes`` and what waits for a copy out of the pool and returns
    them, in any thread and any number of times.
    """

    __slots__ = ("_source", "num_bytes", "stored")

    def __init__(
        self, source: bytes | memoryview | Callable[[], bytes], num_bytes: int | None = None
    ) -> None:
        self._source: memoryview | Callable[[], bytes]
        if callable(source):
            assert num_bytes is not None
            self._source, self.num_bytes = source, num_bytes
        else:
            self._source = memoryview(source).cast("B").toreadonly()
            self.num_bytes = self._source.nbytes
        self.stored = StoredFile()

    @property
    def file(self) -> str | None:
        """Where a store keeps the state, once it does."""
        return self.stored.name

    @file.setter
    def file(self, name: str | None) -> None:
        self.stored.name = name

    @property
    def data(self) -> memoryview:
        """The bytes, read-only. Waits where the copy is not complete: not for the engine thread."""
        if isinstance(self._source, memoryview):
            return self._source
        self._source = source = memoryview(self._source())
        return source


class UnfedSegment(NamedTuple):
    """Tokens of a text that the state has not seen, and how they are to be cut.

    With a ``plan`` they begin a prompt of that many tokens, at least their own
    number; 0 means one by one, as they were generated.
    """

    tokens: Sequence[int]
    plan: int


class Constraint(NamedTuple):
    """The grammar that the text follows, and the tokens that were generated under it."""

    grammar: str
    tokens: tuple[int, ...] = ()


class Origin(NamedTuple):
    """What a session's text begins with, a named state or a prefix: its digest, and its tokens."""

    digest: str
    length: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A request that has not finished.

    ``length`` is that of the session's text before it, ``withheld`` what its stop
    strings hold back. ``num_cached`` tokens of its prompt came from the prefix cache. ``turn``
    is where the text of a chat's turn is, None at its beginning.
    """

    request: Request
    length: int
    num_generated: int = 0
    withheld: str = ""
    num_cached: int = 0
    turn: TurnState | None = None


@dataclass(frozen=True, slots=True)
class SessionValue:
    """One session at one moment, between two steps.

    ``position`` counts the tokens that ``state`` has seen; ``unfed`` comes next,
    then ``pending``, the text's last token. ``recent`` are the last tokens that
    the state has seen, for penalties, ``undecoded`` the bytes of an unfinished
    character. ``seq`` numbers the events sent, ``log_index`` the log's entries.
    ``constraint`` is one whose text has not ended. ``state`` None is the empty one.
    With an ``origin`` the text began with a prefix, or with a named state, which may have seen no
    token and is not the empty one even so.
    """

    id: str
    owner: str
    epoch: int = 0
    position: int = 0
    unfed: tuple[UnfedSegment, ...] = ()
    pending: int | None = None
    seq: int = 0
    log_index: int = 0
    recent: tuple[int, ...] = ()
    undecoded: bytes = b""
    progress: Progress | None = None
    state: StateBlock | None = None
    constraint: Constraint | None = None
    origin: Origin | None = None

    @property
    def has_state(self) -> bool:
        """Whether the session's state, wherever it is kept, differs from the empty one."""
        return self.position > 0 or self.origin is not None

    @property
    def length(self) -> int:
        """Tokens of the session's text."""
        unseen = sum(len(segment.tokens) for segment in self.unfed)
        return self.position + unseen + (self.pending is not None)

    @property
    def min_length(self) -> int:
        """The fewest tokens that `Session.cut_prompt` can leave of the text.

        Within a prompt the state has seen a part of it, and any longer part can still be fed.
        """
        progress = self.progress
        if progress is None or progress.num_generated:
            return self.length
        return min(self.length, max(self.position, progress.length) + 1)

    @property
    def known(self) -> tuple[int, ...]:
        """The text's last tokens; all where they are as many as its ``length``."""
        pending = () if self.pending is None else (self.pending,)
        return (*self.recent, *(t for part in self.unfed for t in part.tokens), *pending)


class Opened(NamedTuple):
    """A session that is new: empty, forked, imported or begun with what others have read."""

    value: SessionValue


class Accepted(NamedTuple):
    """A request begins: ``tokens`` (a start token included) follow ``length`` tokens of text."""

    request: Request
    tokens: Sequence[int]
    length: int
    seq: int


class Saved(NamedTuple):
    """The session's value here; what came before is not needed to continue from it.

    ``evicted``: the engine has dropped it; the store alone has it now.
    """

    value: SessionValue
    evicted: bool = False


class Rewound(NamedTuple):
    """The text was cut back to ``value.length``; ``value.epoch`` is a new one."""

    value: SessionValue


class Deleted(NamedTuple):
    """The session was deleted."""


#: `Accepted`, `TokenEvent` and `Finished` count in ``log_index``; the others carry it.
Entry = Opened | Accepted | TokenEvent | Finished | Saved | Rewound | Deleted

#: A session's id, and what happened to it.
Record = tuple[str, Entry]


@dataclass(frozen=True, slots=True)
class Past:
    """What a session was: ``value``, brought forward by ``entries``; ``at`` tokens of text, or all.

    The ``min_length`` of ``value`` is at most ``at``.
    """

    value: SessionValue
    entries: Sequence[Entry] = ()
    at: int | None = None
