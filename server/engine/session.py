"""One session: its text, as far as its state has seen it and beyond, its grammar, and its value.

Where a kept session is, as one replica knows it, is a table:

    ABSENT --load--> LOADING --held_elsewhere--> REMOTE
      ^ |               |  ^------handed_over-------'
      | open            | restore                restore_unfinished
      | v               v                             v
      | IDLE <--------- * --begin--> RUNNING --park--> PARKED
      |  | ^--------finish-------------'  ^--unpark-----'
      |  evict                                        evict
      '--- LEAVING <----------------------------------'

The engine's `SessionTable` and the `SessionLoader` change a stage by `after` alone, which knows no
other ways. What the store does with a session that is ABSENT here is not in the table.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from server.engine.sampling import PENALTY_WINDOW
from server.engine.text import Detokenizer, TokenArray, TurnState, TurnText
from server.engine.types import Finished, Request, TokenEvent
from server.errors import RequestError

# -------------------------------------------------------------------------------------------------
# Where a kept session is: its stages, and what leads from one to another.


class Stage(Enum):
    """Where a kept session is, as one replica knows it."""

    ABSENT = auto()  # in the store alone, or nowhere
    LOADING = auto()  # a command waits for the store, or brings what it has loaded
    REMOTE = auto()  # a command waits for the replica that holds the session
    IDLE = auto()  # in the engine, without a request
    RUNNING = auto()  # in the engine, with a request that computes or waits for its turn
    PARKED = auto()  # in the engine, with a request that is paused
    LEAVING = auto()  # being written to the store, which releases it


class SessionEvent(Enum):
    """What happens to a kept session."""

    OPEN = auto()  # it is created, forked, imported, or cut back
    LOAD = auto()  # a command wants it
    FAIL = auto()  # it cannot be loaded
    HELD_ELSEWHERE = auto()  # another replica holds it
    HANDED_OVER = auto()  # that replica has released it
    RESTORE = auto()  # the engine has it again
    RESTORE_UNFINISHED = auto()  # the same, with the request that it ran
    BEGIN = auto()  # a request is accepted
    PARK = auto()  # its reader is slow or away
    UNPARK = auto()  # its reader has caught up, or its time without one begins
    FINISH = auto()  # the request has ended, was cancelled or has failed
    EVICT = auto()  # its room is needed, its time is over, or another replica asks for it
    SAVED = auto()  # its value is among the records for the store
    CLOSE = auto()  # it is deleted, replaced by a rewind, or discarded


TRANSITIONS: Mapping[tuple[Stage, SessionEvent], Stage] = {
    (Stage.ABSENT, SessionEvent.OPEN): Stage.IDLE,
    (Stage.ABSENT, SessionEvent.LOAD): Stage.LOADING,
    (Stage.LOADING, SessionEvent.FAIL): Stage.ABSENT,
    (Stage.LOADING, SessionEvent.HELD_ELSEWHERE): Stage.REMOTE,
    (Stage.REMOTE, SessionEvent.HANDED_OVER): Stage.LOADING,
    (Stage.REMOTE, SessionEvent.FAIL): Stage.ABSENT,
    (Stage.LOADING, SessionEvent.RESTORE): Stage.IDLE,
    (Stage.LOADING, SessionEvent.RESTORE_UNFINISHED): Stage.PARKED,
    (Stage.IDLE, SessionEvent.BEGIN): Stage.RUNNING,
    (Stage.RUNNING, SessionEvent.PARK): Stage.PARKED,
    (Stage.PARKED, SessionEvent.UNPARK): Stage.RUNNING,
    (Stage.RUNNING, SessionEvent.FINISH): Stage.IDLE,
    (Stage.PARKED, SessionEvent.FINISH): Stage.IDLE,
    (Stage.IDLE, SessionEvent.EVICT): Stage.LEAVING,
    (Stage.PARKED, SessionEvent.EVICT): Stage.LEAVING,
    (Stage.LEAVING, SessionEvent.SAVED): Stage.ABSENT,
    (Stage.IDLE, SessionEvent.CLOSE): Stage.ABSENT,
}


def after(stage: Stage, event: SessionEvent) -> Stage:
    """The stage that follows. It is a fault of this program where the table has none."""
    assert (stage, event) in TRANSITIONS, f"{event.name} in {stage.name}"
    return TRANSITIONS[stage, event]


# -------------------------------------------------------------------------------------------------
# What the engine needs of whatever reads a grammar: where its tokens may continue.
#
# The engine never looks inside. A session keeps the grammar's text and the tokens
# generated under it, from which a matcher can be built again anywhere.


class Matcher(Protocol):
    """A place in the texts of one grammar. The engine's thread owns it."""

    def allowed(self, budget: int) -> npt.NDArray[np.uint32]:
        """Which tokens may come: bit ``i % 32`` of word ``i // 32`` for token ``i``.

        Padded to whole words. The end-of-text token's bit is set exactly where the
        text may end. At most ``budget`` tokens will come in all, so that it can see
        to it that the text is complete by then.
        """

    def accept(self, token: int) -> None:
        """Continues by ``token``. Raises `RequestError` where it is not allowed."""

    def is_over(self) -> bool:
        """Whether nothing but the end may follow."""

    #: Seconds that the last token took to compute: its mask, and to continue by it.
    cost_s: float

    def copy(self) -> Matcher:
        """Another one at this place, that continues by itself."""


# -------------------------------------------------------------------------------------------------
# A session as a value, and the entries of the log that it can be rebuilt from.
#
# A value is all that a continuation depends on. `Saved` puts one into the log, and
# the entries after it lead to the present: `server.engine.kept` folds them in.


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


# -------------------------------------------------------------------------------------------------
# A grammar that a session's text follows, while the session is in the engine.


Matchers = Callable[[str], Matcher]

#: What the first token under a grammar is taken to cost.
UNKNOWN_S = 0.003


class OpenConstraint:
    """The live form of a `Constraint`.

    Its matcher is made when it is first needed, from the grammar and ``tokens``,
    and may be dropped at any time: what comes next is the same.
    """

    __slots__ = ("_before_s", "_matcher", "grammar", "tokens")

    def __init__(self, grammar: str, tokens: Iterable[int] = ()) -> None:
        self.grammar, self.tokens = grammar, list(tokens)
        self._matcher: Matcher | None = None
        self._before_s = UNKNOWN_S

    @property
    def value(self) -> Constraint:
        return Constraint(self.grammar, tuple(self.tokens))

    def allowed(
        self, matchers: Matchers, budget: int, ends: Sequence[int]
    ) -> npt.NDArray[np.uint32]:
        """The mask of the tokens that may come, ``budget`` in all. Raises as the matcher does.

        ``ends`` are those that end the text without being part of it: the end-of-text
        token, and others that may come where that may.
        """
        matcher = self._made(matchers)
        self._before_s = matcher.cost_s
        mask = matcher.allowed(budget)
        eos, *others = ends
        if others and mask[eos // 32] >> (eos % 32) & 1:
            for id in others:
                mask[id // 32] |= np.uint32(1 << id % 32)
        return mask

    def accept(self, token: int, ends: Sequence[int], matchers: Matchers) -> bool:
        """Continues by ``token``; says whether the text is complete. Raises as `allowed` does."""
        if token in ends:
            return True
        matcher = self._made(matchers)
        matcher.accept(token)
        self.tokens.append(token)
        return matcher.is_over()

    @property
    def cost_s(self) -> float:
        """Seconds that the next token may take, by the last one."""
        return UNKNOWN_S if self._matcher is None else self._matcher.cost_s

    @property
    def draft_cost_s(self) -> float:
        """Seconds that each token after the next one may take: one that was slow says nothing."""
        return min(self._before_s, self.cost_s)

    def rest(self) -> None:
        """Lets the matcher go, which takes memory."""
        self._matcher = None

    def copy(self) -> OpenConstraint:
        """Another one at this place."""
        other = OpenConstraint(self.grammar, self.tokens)
        if self._matcher is not None:
            other._matcher = self._matcher.copy()
        return other

    def _made(self, matchers: Matchers) -> Matcher:
        if self._matcher is None:
            matcher = matchers(self.grammar)
            for token in self.tokens:
                matcher.accept(token)
            self._matcher = matcher
        return self._matcher


def no_matchers(grammar: str) -> Matcher:
    """Stands for `Matchers` where there are none: a session can come from elsewhere."""
    raise RequestError("this server cannot follow a grammar")


@dataclass(slots=True)
class _Unfed:
    """An `UnfedSegment` of which ``num_fed`` tokens have been fed."""

    tokens: array[int] = field(repr=False)
    plan: int
    num_fed: int = 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class Session:
    """One session, of constant size but for what its state has not seen yet.

    Its text is what the state has seen (``position`` tokens), then what it is
    unfed, then ``pending``, the last token: to feed that one is what gives the
    next request its first logits. ``state`` None is the empty one, unless the
    session has a ``slot``; ``stored`` is the position of the last copy of its state, and the
    file that a store keeps that in. The request that it runs is known to `SessionTable`. One
    that is ``expendable`` may be forgotten where there is no room and no store. The ``stage`` of
    one that is kept changes in `SessionTable.change`. Its text is not in its ``repr``, which a log
    may show.
    """

    id: str
    owner: str
    detokenizer: Detokenizer
    last_used: float
    keep: bool
    epoch: int = 0
    slot: int | None = None
    state: StateBlock | None = None
    stored: tuple[int, StoredFile] | None = None
    position: int = 0
    pending: int | None = field(default=None, repr=False)
    seq: int = 0
    log_index: int = 0
    saved_position: int = 0
    num_unfed: int = 0
    constraint: OpenConstraint | None = field(default=None, repr=False)
    expendable: bool = False
    stage: Stage = Stage.ABSENT
    origin: Origin | None = None
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=PENALTY_WINDOW), repr=False)
    _segments: deque[_Unfed] = field(default_factory=deque)

    @classmethod
    def of(cls, value: SessionValue, detokenizer: Detokenizer, now: float) -> Session:
        """A kept session that sleeps; the value's request is left to the caller."""
        session = cls(value.id, value.owner, detokenizer, now, keep=True)
        session.epoch, session.seq, session.log_index = value.epoch, value.seq, value.log_index
        session.state, session.position = value.state, value.position
        session.saved_position = value.position
        if value.state is not None:
            session.stored = value.position, value.state.stored
        session.pending, session.origin = value.pending, value.origin
        session.recent.extend(value.recent)
        for segment in value.unfed:
            tokens = TokenArray.of(segment.tokens).copied()
            session._segments.append(_Unfed(tokens, segment.plan))
            session.num_unfed += len(segment.tokens)
        session.write_on(value)
        return session

    def value(self, state: StateBlock | None, progress: Progress | None = None) -> SessionValue:
        """The session now, with ``state`` as its state and the ``progress`` of what it runs."""
        return SessionValue(
            self.id,
            self.owner,
            self.epoch,
            self.position,
            tuple(_segment(unfed) for unfed in self._segments),
            self.pending,
            self.seq,
            self.log_index,
            tuple(self.recent),
            self.detokenizer.undecoded,
            progress,
            state,
            None if self.constraint is None else self.constraint.value,
            self.origin,
        )

    @property
    def length(self) -> int:
        """Tokens of the session's text."""
        return self.position + self.num_unfed + (self.pending is not None)

    @property
    def origin_digest(self) -> str:
        """Of the named state that the text began with; empty where there is none."""
        return "" if self.origin is None else self.origin.digest

    @property
    def is_new(self) -> bool:
        """Whether the session has read nothing yet, beyond the state that it began with."""
        return self.length == (0 if self.origin is None else self.origin.length)

    @property
    def plan(self) -> int:
        """Tokens of the prompt that the next token unfed begins; 1 where it is fed alone."""
        if not self._segments or not self._segments[0].plan:
            return 1
        return self._segments[0].plan - self._segments[0].num_fed

    def write_on(self, value: SessionValue) -> None:
        """Continues with the unfinished character of ``value``, and under its constraint."""
        self.detokenizer.restore(value.undecoded, self._is_start(value))
        open = value.constraint
        self.constraint = None if open is None else OpenConstraint(*open)

    def begin(self, request: Request, tokens: Sequence[int]) -> None:
        """Adds ``tokens``, those of ``request`` and perhaps a start token, to the text.

        An unfinished character, and what a grammar asks for, end where new text begins.
        """
        self.expendable = request.unattended
        if request.tokens:
            self.detokenizer.flush()
            self.constraint = None
        params = request.sampling
        if params is not None and params.grammar is not None and not params.thinks_first:
            self.constraint = OpenConstraint(params.grammar)
        self.detokenizer.skip(tokens)
        if tokens:
            self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds a prompt to the text; the token that was pending is the first of it."""
        before = () if self.pending is None else (self.pending,)
        unfed = TokenArray.joined(before, tokens).copied()
        self.pending = unfed.pop()
        self._add_unfed(unfed, len(unfed))

    def hold(self, token: int) -> None:
        """Adds a generated token to the text; one that is still pending has not been fed alone."""
        if self.pending is not None:  # it has not been fed
            if self._segments and not self._segments[-1].plan:
                self._segments[-1].tokens.append(self.pending)
                self.num_unfed += 1
            else:
                self._add_unfed(array("I", (self.pending,)), 0)
        self.pending = token

    def next(self, count: int) -> list[int]:
        """The next ``count`` tokens for the state: the unfed ones, then the pending one."""
        tokens: list[int] = []
        for unfed in self._segments:
            if len(tokens) == count:
                return tokens
            tokens += unfed.tokens[unfed.num_fed : unfed.num_fed + count - len(tokens)]
        if len(tokens) < count:
            assert self.pending is not None and len(tokens) + 1 == count, (count, self)
            tokens.append(self.pending)
        return tokens

    def last(self, count: int) -> list[int]:
        """The last ``count`` tokens of the text, or as many as are still known."""
        if count == 1 and self.pending is not None:
            return [self.pending]
        unfed = self.next(self.num_unfed + (self.pending is not None))
        known = [*self.recent, *unfed]
        return known[max(len(known) - count, 0) :]

    def advance(self, tokens: Sequence[int]) -> None:
        """The state has seen ``tokens``, which `next` gave."""
        self.position += len(tokens)
        self.recent.extend(tokens)
        left = len(tokens)
        while left and self._segments:
            unfed = self._segments[0]
            part = min(left, len(unfed.tokens) - unfed.num_fed)
            unfed.num_fed += part
            self.num_unfed -= part
            left -= part
            if unfed.num_fed == len(unfed.tokens):
                self._segments.popleft()
        if left:
            self.pending = None

    def cut(self, length: int) -> None:
        """Shortens the text to ``length`` tokens, none of which the state has not seen yet.

        The last one left is pending, also where it is an unfed one.
        """
        excess = self.length - length
        assert excess >= 0 and length >= self.position, (length, self)
        if not excess:
            return
        self.pending = None
        self._drop_unfed(excess - 1)
        if self.num_unfed:
            self.pending = self._segments[-1].tokens[-1]
            self._drop_unfed(1)
        value = self.value(self.state)
        self.detokenizer.restore(value.undecoded, self._is_start(value))

    def cut_prompt(self, length: int) -> None:
        """Shortens the text to ``length`` tokens, at least `SessionValue.min_length`.

        Within its prompt nothing was to be generated yet, and so under no grammar.
        """
        if length < self.length:
            self.cut(length)
            self.constraint = None

    def end_thinking(self, request: Request, turn: TurnText) -> None:
        """A grammar of ``request`` begins to apply where ``turn``, its text, thinks no more."""
        assert request.sampling is not None, request
        if self.constraint is None and not turn.is_thinking:
            grammar = request.sampling.grammar
            self.constraint = None if grammar is None else OpenConstraint(grammar)

    def _is_start(self, value: SessionValue) -> bool:
        """Whether the session's text has no token yet that stands for some."""
        known = value.known
        return len(known) == value.length and all(map(self.detokenizer.is_silent, known))

    def _add_unfed(self, tokens: array[int], plan: int) -> None:
        if tokens:
            self._segments.append(_Unfed(tokens, plan))
            self.num_unfed += len(tokens)

    def _drop_unfed(self, count: int) -> None:
        """Drops the last ``count`` of the unfed tokens."""
        while count:
            unfed = self._segments[-1]
            part = min(count, len(unfed.tokens) - unfed.num_fed)
            del unfed.tokens[len(unfed.tokens) - part :]
            unfed.plan = min(unfed.plan, len(unfed.tokens))
            self.num_unfed -= part
            count -= part
            if unfed.num_fed == len(unfed.tokens):
                self._segments.pop()


def _segment(unfed: _Unfed) -> UnfedSegment:
    plan = unfed.plan - unfed.num_fed if unfed.plan else 0
    return UnfedSegment(TokenArray(unfed.tokens[unfed.num_fed :]), plan)
