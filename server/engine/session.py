"""One session: its text, as far as its state has seen it and beyond."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from server.engine.constraint import OpenConstraint
from server.engine.detokenizer import Detokenizer
from server.engine.sampling import PENALTY_WINDOW
from server.engine.token_ids import TokenArray
from server.engine.turn_text import TurnText
from server.engine.types import Request
from server.engine.value import (
    Origin,
    Progress,
    SessionValue,
    StateBlock,
    StoredFile,
    UnfedSegment,
)


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
    that is ``expendable`` may be forgotten where there is no room and no store. Its
    text is not in its ``repr``, which a log may show.
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
