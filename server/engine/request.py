"""A request between `Engine.submit` and its `Finished`, and its phases."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from server.engine.runner import Draw, TokenScore
from server.engine.sampling import has_penalty
from server.engine.session import Progress, Session
from server.engine.text import StopStrings, TurnText
from server.engine.types import Request

# -------------------------------------------------------------------------------------------------
# The life of a request as a table: which phase may follow which.
#
#     waiting <-> running -> finished
#         \         |
#          parked <--
#
# A running request goes back to waiting where others wait for a slot and it has
# had its turn. It is parked while its client does not keep up, or is away.


class Phase(Enum):
    """Where a live request is."""

    WAITING = auto()
    RUNNING = auto()
    PARKED = auto()
    FINISHED = auto()


_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.PARKED, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.PARKED, Phase.FINISHED}),
    Phase.PARKED: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


def check_move(old: Phase, new: Phase) -> None:
    """Asserts that the table allows the move."""
    assert new in _NEXT[old], f"{old.name} -> {new.name}"


@dataclass(eq=False, slots=True)
class Live:
    """Where a request is. What does not change from token to token is worked out once.

    ``length`` is that of the session's text before this request. ``whole`` says
    that a prompt may be cut anywhere; then a feed ends at each of ``boundaries``:
    at those in ``cached_at`` the prefix cache takes the state of ``prompt``, which begins at
    ``prompt_at`` and is kept up to the last one. ``feeds_last`` says that the text's last
    token is fed with the others, ``alone`` that they are no part of a batch. ``ends`` are the
    tokens that end it, ``silent_ends`` those that end a text under a grammar: they are no part
    of it.
    At ``max_generated`` tokens it parks. ``scores`` and ``embedding`` are those of the
    prompt so far, ``drafts`` what a drafter proposes for the next step.
    """

    request: Request = field(repr=False)
    session: Session
    length: int
    whole: bool
    draw: Draw | None = field(default=None, repr=False)
    penalized: bool = False
    owner: str = ""  # whose turn among the waiting it takes
    max_tokens: int = 0
    ends: frozenset[int] = frozenset()
    silent_ends: tuple[int, ...] = ()
    stop_strings: StopStrings | None = None
    turn: TurnText | None = None
    feeds_last: bool = False
    alone: bool = False
    scores: list[TokenScore] | None = field(default=None, repr=False)
    embedding: npt.NDArray[np.float64] | None = field(default=None, repr=False)
    wants_logprobs: bool = False
    logprob_sum: float | None = None
    num_top: int | None = None
    drafts: Sequence[int] = ()
    num_drafts: int = 0  # that the next step is to feed
    drafts_of_model: bool = False  # they are a small model's
    num_accepted: int = 0  # of the tokens that were drafted
    num_rejected: int = 0
    phase: Phase = Phase.WAITING
    num_generated: int = 0
    num_cached: int = 0  # tokens of the prompt that the prefix cache had
    num_in_turn: int = 0  # generated since it got its slot
    max_generated: int = sys.maxsize
    started: bool = False
    start: tuple[int, ...] = ()  # the start token, where it has added one
    detached: bool = False  # its events have no reader
    prompt: Sequence[int] = field(default=(), repr=False)
    prompt_at: int = 0
    cached_at: tuple[int, ...] = ()
    boundaries: deque[int] = field(default_factory=deque)
    prefix: str | None = None  # the handle of the prompt, once it is known
    num_bytes: int = 0  # that the request counts for where memory is bounded

    @classmethod
    def of(
        cls,
        progress: Progress,
        session: Session,
        draw: Draw | None,
        eos: tuple[int, ...],
        whole: bool,
    ) -> Live:
        """The request of ``progress`` on ``session``; ``draw`` None only feeds.

        ``eos`` are the ids that end a text, that which a grammar's end is first.
        """
        request, params = progress.request, progress.request.sampling
        live = cls(request, session, progress.length, whole, draw, owner=request.owner)
        live.num_generated, live.num_cached = progress.num_generated, progress.num_cached
        live.num_bytes = request.num_bytes
        if request.score:
            live.start_scoring()
        else:
            live.feeds_last = draw is not None
        if request.embed:
            live.embedding, live.feeds_last, live.alone = np.zeros(()), True, True
        if params is not None:
            live.penalized = has_penalty(params)
            live.logprob_sum, live.num_top = 0.0 if params.logprob else None, params.top_logprobs
            live.wants_logprobs = params.logprob or params.top_logprobs is not None
            live.max_tokens = params.max_tokens
            live.ends = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos)))
            silent = filter(session.detokenizer.is_silent, sorted(live.ends - {eos[0]}))
            live.silent_ends = (eos[0], *silent)
            live.turn = turn_of(progress)
            if params.stop and live.turn is None:
                live.stop_strings = StopStrings(params.stop)
                live.stop_strings.restore(progress.withheld)
        return live

    @property
    def progress(self) -> Progress:
        """What a continuation of it needs besides its session."""
        withheld = self.stop_strings.withheld if self.stop_strings else ""
        turn = None if self.turn is None else self.turn.state
        return Progress(
            self.request, self.length, self.num_generated, withheld, self.num_cached, turn
        )

    def is_end(self, token: int) -> bool:
        """Whether ``token`` ends the text; until an answer begins one that has text does not."""
        if token not in self.ends:
            return False
        awaits = self.turn is not None and self.turn.awaits_answer
        return not awaits or self.session.detokenizer.is_silent(token)

    @property
    def parked(self) -> bool:
        return self.phase is Phase.PARKED

    @property
    def position(self) -> int:
        """Tokens that the session's state has seen."""
        return self.session.position

    @property
    def num_unfed(self) -> int:
        """Tokens that the next chunk may hold."""
        session = self.session
        if not session.num_unfed:
            return 1
        if not self.whole:
            return session.plan
        count = session.num_unfed + self.feeds_last
        return min(count, self.boundaries[0] - session.position) if self.boundaries else count

    @property
    def budget(self) -> int:
        """Tokens that it may still generate."""
        return self.max_tokens - self.num_generated

    def max_drafts(self, limit: int) -> int:
        """How many drafts may be of use where a row has room for ``limit``; 0 or less: none.

        The last token of a request is never fed. In a chat's turn none is drawn with drafts that
        may be forced, as where the thinking has used up its budget.
        """
        if self.draw is None or self.alone or self.boundaries:
            return 0
        most = min(self.max_tokens, self.max_generated) - self.num_generated - 1
        free = None if self.turn is None else self.turn.num_unrestricted
        if free is not None:
            most = min(most, free - 1)
        return min(limit - self.session.num_unfed, most)

    def start_scoring(self) -> None:
        """From here to the end of its prompt; its last token is left for a draw."""
        self.scores, self.alone, self.feeds_last = [], True, False

    def stop_scoring(self) -> list[TokenScore]:
        """It is read on with the others; what was noted so far."""
        scores, self.scores = self.scores or [], None
        self.alone, self.feeds_last = False, self.draw is not None
        return scores

    def move(self, phase: Phase) -> None:
        """Goes to ``phase``, as the table of phases allows."""
        check_move(self.phase, phase)
        self.phase = phase


def turn_of(progress: Progress) -> TurnText | None:
    """The reader of the text of ``progress``, where it is a turn of a chat."""
    params = progress.request.sampling
    if params is None or params.turn is None:
        return None
    waits = params.grammar is not None and params.thinks_first
    found = TurnText(params.turn, params.stop, waits)
    if progress.turn is not None:
        found.restore(progress.turn, progress.num_generated)
    return found
