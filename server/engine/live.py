"""A request between `Engine.submit` and its `Finished`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.engine.detokenizer import StopStrings
from server.engine.lifecycle import Phase
from server.engine.runner import Draw
from server.engine.sampling import has_penalty
from server.engine.sessions import Session
from server.engine.types import Request


@dataclass(eq=False, slots=True)
class Live:
    """Where a request is. What does not change from token to token is worked out once.

    ``tokens`` are to be fed: the session's pending token, then the prompt.
    ``held`` is the prompt's last token if nothing is generated after it, and
    ``length`` that of the session before this request. ``ends`` are the tokens
    that end it; ``recent`` are the session's, where a penalty reads them.
    """

    request: Request
    session: Session
    tokens: tuple[int, ...]
    held: tuple[int, ...]
    length: int
    num_unfed: int  # tokens that are known, and that the state has not seen
    draw: Draw | None = None
    recent: Sequence[int] | None = None
    max_tokens: int = 0
    ends: frozenset[int] = frozenset()
    stop_strings: StopStrings | None = None
    phase: Phase = Phase.WAITING
    num_fed: int = 0  # of ``tokens``
    num_generated: int = 0

    @classmethod
    def feeding(cls, request: Request, session: Session, tokens: tuple[int, ...]) -> Live:
        """A request that only feeds ``tokens``, the last of which stays pending."""
        length, num_unfed = session.length, len(tokens) - 1
        return cls(request, session, tokens[:-1], tokens[-1:], length, num_unfed)

    @classmethod
    def generating(
        cls,
        request: Request,
        session: Session,
        tokens: tuple[int, ...],
        draw: Draw,
        eos_token_id: int,
    ) -> Live:
        """A request that feeds ``tokens`` and then samples with ``draw``."""
        params = request.sampling
        assert params is not None
        eos = () if params.ignore_eos else (eos_token_id,)
        return cls(
            request,
            session,
            tokens,
            (),
            session.length,
            len(tokens),
            draw=draw,
            recent=session.recent if has_penalty(params) else None,
            max_tokens=params.max_tokens,
            ends=frozenset((*params.stop_token_ids, *eos)),
            stop_strings=StopStrings(params.stop) if params.stop else None,
        )

    @property
    def position(self) -> int:
        """Tokens that the session's state has seen."""
        return self.session.position
