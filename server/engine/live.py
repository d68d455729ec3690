"""A request between `Engine.submit` and its `Finished`."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field

from server.engine.detokenizer import StopStrings
from server.engine.lifecycle import Phase, check_move
from server.engine.runner import Draw
from server.engine.sampling import has_penalty
from server.engine.sessions import Session
from server.engine.types import Request
from server.engine.value import Progress


@dataclass(eq=False, slots=True)
class Live:
    """Where a request is. What does not change from token to token is worked out once.

    ``length`` is that of the session's text before this request. ``whole`` says
    that a prompt may be cut anywhere; then a feed ends at each of ``boundaries``:
    at those in ``cached_at`` the prefix cache takes the state of ``prompt``. ``ends`` are
    the tokens that end it. At ``max_generated`` tokens it parks. ``scores`` are
    the log-probabilities of the prompt's tokens, where they are wanted.
    """

    request: Request = field(repr=False)
    session: Session
    length: int
    whole: bool
    draw: Draw | None = field(default=None, repr=False)
    penalized: bool = False
    max_tokens: int = 0
    ends: frozenset[int] = frozenset()
    stop_strings: StopStrings | None = None
    scores: list[float] | None = field(default=None, repr=False)
    logprob_sum: float | None = None
    phase: Phase = Phase.WAITING
    num_generated: int = 0
    num_in_turn: int = 0  # generated since it got its slot
    max_generated: int = sys.maxsize
    started: bool = False
    detached: bool = False  # nobody reads its events
    prompt: tuple[int, ...] = field(default=(), repr=False)
    cached_at: tuple[int, ...] = ()
    boundaries: deque[int] = field(default_factory=deque)

    @classmethod
    def of(
        cls, progress: Progress, session: Session, draw: Draw | None, eos: int, whole: bool
    ) -> Live:
        """The request of ``progress`` on ``session``; ``draw`` None only feeds."""
        request, params = progress.request, progress.request.sampling
        live = cls(request, session, progress.length, whole, draw)
        live.num_generated = progress.num_generated
        if request.score:
            live.scores = []
        if params is not None:
            live.penalized = has_penalty(params)
            live.logprob_sum = 0.0 if params.logprob else None
            live.max_tokens = params.max_tokens
            end = () if params.ignore_eos else (eos,)
            live.ends = frozenset((*params.stop_token_ids, *end))
            if params.stop:
                live.stop_strings = StopStrings(params.stop)
                live.stop_strings.restore(progress.withheld)
        return live

    @property
    def progress(self) -> Progress:
        """What a continuation of it needs beside its session."""
        withheld = self.stop_strings.withheld if self.stop_strings else ""
        return Progress(self.request, self.length, self.num_generated, withheld)

    @property
    def parked(self) -> bool:
        return self.phase is Phase.PARKED

    @property
    def owner(self) -> str:
        """The tenant whose turn among the waiting it takes."""
        return self.request.owner

    @property
    def position(self) -> int:
        """Tokens that the session's state has seen."""
        return self.session.position

    @property
    def num_unfed(self) -> int:
        """Tokens that the next chunk may hold."""
        session = self.session
        if not session.num_owed:
            return 1
        if not self.whole:
            return session.plan
        count = session.num_owed + (self.draw is not None)
        return min(count, self.boundaries[0] - session.position) if self.boundaries else count

    def move(self, phase: Phase) -> None:
        """Goes to ``phase``, as the table of phases allows."""
        check_move(self.phase, phase)
        self.phase = phase
