"""Sessions, and the table of those that the engine has.

A session that runs holds a slot of the pool. Any other may lose its slot to one
that wants to run: its state then sleeps in the host's memory, until it runs
again or leaves for a store. The pool and ``max_asleep`` bound the table, so that
every session in it has room for its state.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from server.engine.detokenizer import Detokenizer
from server.engine.errors import SessionBusy, SessionNotFound
from server.engine.sampling import PENALTY_WINDOW
from server.engine.state_pool import StatePool
from server.engine.value import Segment, SessionValue, StateBlock

if TYPE_CHECKING:
    from server.engine.live import Live


@dataclass(slots=True)
class _Owed:
    """A `Segment` of which ``num_fed`` tokens are no longer owed."""

    tokens: list[int] = field(repr=False)
    plan: int
    num_fed: int = 0


@dataclass(eq=False, slots=True)
class Session:
    """One session, of constant size but for what its state has not seen yet.

    Its text is what the state has seen (``position`` tokens), then what it is
    owed, then ``pending``, the last token: to feed that one is what gives the
    next request its first logits. ``state`` None is the empty one, unless the
    session has a ``slot``. ``live`` is the request that it runs. What it says is
    not in its ``repr``, which a log may show.
    """

    id: str
    owner: str
    detokenizer: Detokenizer
    last_used: float
    keep: bool
    epoch: int = 0
    slot: int | None = None
    state: StateBlock | None = None
    position: int = 0
    pending: int | None = field(default=None, repr=False)
    seq: int = 0
    log_index: int = 0
    live: Live | None = field(default=None, repr=False)
    saved_position: int = 0
    num_owed: int = 0
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=PENALTY_WINDOW), repr=False)
    _debt: deque[_Owed] = field(default_factory=deque)

    @classmethod
    def of(cls, value: SessionValue, detokenizer: Detokenizer, now: float) -> Session:
        """A kept session that sleeps; the value's request is left to the caller."""
        session = cls(value.id, value.owner, detokenizer, now, keep=True)
        session.epoch, session.seq, session.log_index = value.epoch, value.seq, value.log_index
        session.state, session.position = value.state, value.position
        session.saved_position = value.position
        session.pending = value.pending
        session.recent.extend(value.recent)
        for segment in value.debt:
            session._debt.append(_Owed(list(segment.tokens), segment.plan))
            session.num_owed += len(segment.tokens)
        detokenizer.restore(value.undecoded)
        return session

    def value(self, state: StateBlock | None) -> SessionValue:
        """The session now, with ``state`` as its state."""
        return SessionValue(
            self.id,
            self.owner,
            self.epoch,
            self.position,
            tuple(_segment(owed) for owed in self._debt),
            self.pending,
            self.seq,
            self.log_index,
            tuple(self.recent),
            self.detokenizer.undecoded,
            None if self.live is None else self.live.progress,
            state,
        )

    @property
    def length(self) -> int:
        """Tokens of the session's text."""
        return self.position + self.num_owed + (self.pending is not None)

    @property
    def plan(self) -> int:
        """Tokens of the prompt that the next token owed begins; 1 where it is fed alone."""
        if not self._debt or not self._debt[0].plan:
            return 1
        return self._debt[0].plan - self._debt[0].num_fed

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds a prompt to the text; the token that was pending is the first of it."""
        owed = [*([] if self.pending is None else [self.pending]), *tokens]
        self.pending = owed.pop()
        self._owe(owed, len(owed))

    def hold(self, token: int) -> None:
        """Adds a generated token to the text; one that is still pending is owed alone."""
        if self.pending is not None:
            if self._debt and not self._debt[-1].plan:
                self._debt[-1].tokens.append(self.pending)
                self.num_owed += 1
            else:
                self._owe([self.pending], 0)
        self.pending = token

    def next(self, count: int) -> list[int]:
        """The next ``count`` tokens for the state: what it is owed, then the pending one."""
        tokens: list[int] = []
        for owed in self._debt:
            if len(tokens) == count:
                return tokens
            tokens += owed.tokens[owed.num_fed : owed.num_fed + count - len(tokens)]
        if len(tokens) < count:
            assert self.pending is not None and len(tokens) + 1 == count, (count, self)
            tokens.append(self.pending)
        return tokens

    def advance(self, tokens: Sequence[int]) -> None:
        """The state has seen ``tokens``, which `next` gave."""
        self.position += len(tokens)
        self.recent.extend(tokens)
        left = len(tokens)
        while left and self._debt:
            owed = self._debt[0]
            part = min(left, len(owed.tokens) - owed.num_fed)
            owed.num_fed += part
            self.num_owed -= part
            left -= part
            if owed.num_fed == len(owed.tokens):
                self._debt.popleft()
        if left:
            self.pending = None

    def cut(self, length: int) -> None:
        """Shortens the text to ``length`` tokens, none of which the state has not seen yet.

        The last one left is pending, also where it is an owed one.
        """
        excess = self.length - length
        assert excess >= 0 and length >= self.position, (length, self)
        if not excess:
            return
        self.pending = None
        for _ in range(excess - 1):
            self._unowe()
        if self.num_owed:
            self.pending = self._unowe()

    def _owe(self, tokens: list[int], plan: int) -> None:
        if tokens:
            self._debt.append(_Owed(tokens, plan))
            self.num_owed += len(tokens)

    def _unowe(self) -> int:
        owed = self._debt[-1]
        token = owed.tokens.pop()
        self.num_owed -= 1
        if owed.num_fed == len(owed.tokens):
            self._debt.pop()
        return token


def _segment(owed: _Owed) -> Segment:
    plan = owed.plan - owed.num_fed if owed.plan else 0
    return Segment(tuple(owed.tokens[owed.num_fed :]), plan)


class SessionTable:
    """Opens, finds and closes sessions, and moves their states between slots and sleep."""

    def __init__(self, pool: StatePool, max_asleep: int, ttl_s: float) -> None:
        self._pool = pool
        self._max_sessions = pool.num_slots + max_asleep
        self._ttl_s = ttl_s
        self._sessions: dict[str, Session] = {}
        self._quiet: OrderedDict[str, Session] = OrderedDict()  # run nothing; longest idle first
        self._slotted: OrderedDict[str, Session] = OrderedDict()  # may lose their slot

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, id: str) -> bool:
        return id in self._sessions

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    @property
    def num_asleep(self) -> int:
        return sum(session.state is not None for session in self._sessions.values())

    @property
    def has_room(self) -> bool:
        """Whether one more session may be added."""
        return len(self._sessions) < self._max_sessions

    def add(self, session: Session) -> None:
        """A session without a slot."""
        assert self.has_room and session.id not in self._sessions, session.id
        self._sessions[session.id] = session
        if session.keep:
            self._quiet[session.id] = session

    def find(self, id: str, owner: str) -> Session:
        """Raises `SessionNotFound`, also for another owner's session."""
        session = self._sessions.get(id)
        if session is None or session.owner != owner:
            raise SessionNotFound
        return session

    def begin(self, session: Session, live: Live) -> None:
        """The session runs ``live``. Raises `SessionBusy` where it runs another one."""
        if session.live is not None:
            raise SessionBusy
        session.live = live
        self._quiet.pop(session.id, None)

    def end(self, session: Session, now: float) -> None:
        """The request is over: a kept session goes idle, another is closed."""
        session.live = None
        if session.keep:
            self.rest(session, now)
            self.release(session)
        else:
            self.close(session)

    def close(self, session: Session) -> None:
        """Forgets the session, with its slot."""
        assert session.live is None, session.live
        del self._sessions[session.id]
        self._quiet.pop(session.id, None)
        self._slotted.pop(session.id, None)
        if session.slot is not None:
            self._pool.free(session.slot)
            session.slot = None

    def rest(self, session: Session, now: float) -> None:
        """Nobody waits for the session: from now on it is idle, and may leave."""
        session.last_used = now
        self._quiet[session.id] = session

    def stir(self, session: Session) -> None:
        """The session is wanted again."""
        self._quiet.pop(session.id, None)

    # States

    def wake(self, session: Session) -> bool:
        """Gives the session a slot with its state; False where every slot is held for good."""
        if session.slot is None:
            slot = self._pool.allocate()
            if slot is None:
                if not self._slotted:
                    return False
                self._sleep(next(iter(self._slotted.values())))
                slot = self._pool.allocate()
                assert slot is not None
            if session.state is not None:
                self._pool.block(slot)[:] = session.state.data
                session.state = None
            session.slot = slot
        self._slotted.pop(session.id, None)
        return True

    def put(self, session: Session, state: StateBlock) -> None:
        """Makes ``state`` that of a session that has a slot."""
        assert session.slot is not None, session
        self._pool.block(session.slot)[:] = state.data

    def release(self, session: Session) -> None:
        """The session does not run now: whoever needs its slot may have it."""
        if session.slot is not None:
            self._slotted[session.id] = session

    def state_of(self, session: Session) -> StateBlock | None:
        """The session's state, to keep: a copy where it is in a slot."""
        if session.position == 0:
            return None
        if session.slot is None:
            return session.state
        return StateBlock(self._pool.block(session.slot).copy())

    def is_finite(self, state: StateBlock | None) -> bool:
        """Whether ``state`` is worth keeping: what is not finite in it never will be again."""
        if state is None:
            return True
        layers = self._pool.layout.views(state.data[None])
        tensors = (tensor for layer in layers for tensor in layer.values())
        return all(bool(np.isfinite(tensor).all()) for tensor in tensors)

    def _sleep(self, session: Session) -> None:
        session.state = self.state_of(session)
        assert session.slot is not None
        self._pool.free(session.slot)
        session.slot = None
        del self._slotted[session.id]

    # Ends

    def oldest_quiet(self) -> Session | None:
        """The session that has been idle for longest."""
        return next(iter(self._quiet.values()), None)

    def next_expiry(self) -> float | None:
        """When the first idle session's time is over."""
        session = self.oldest_quiet()
        return None if session is None else session.last_used + self._ttl_s
