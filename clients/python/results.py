"""The answers of the server over HTTP, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .events import Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer of ``POST /v1/completions``; ``prefix`` as in `Finished`."""

    text: str
    finish_reason: str
    session: str | None
    seed: int
    position: int
    usage: Usage
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The state of a kept session on the server.

    ``parked``: its request is paused until a client reads it.
    """

    session: str
    model: str
    epoch: str
    position: int
    seq: int
    busy: bool
    parked: bool
    idle_s: float
    state_bytes: int


@dataclass(frozen=True, slots=True)
class TextPart:
    """Tokens ``start`` to ``end`` of a session; ``kind`` is "input" or "output"."""

    kind: str
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class SessionText:
    """The text of tokens ``start`` to ``end`` of a session, which has ``position`` of them."""

    start: int
    end: int
    position: int
    parts: list[TextPart]

    @property
    def text(self) -> str:
        """The text of all parts, joined."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A kept session in a list, in memory or in the store."""

    session: str
    epoch: str
    position: int
    seq: int
    busy: bool
    stored_bytes: int


class SessionPage(NamedTuple):
    """A page of sessions. The next page begins after the id ``after``; None on the last one."""

    sessions: list[ListedSession]
    after: str | None


@dataclass(frozen=True, slots=True)
class Score:
    """The natural logarithm of a continuation's probability, and of each of its tokens.

    ``is_greedy``: each token is the most probable one at its position.
    ``top_logprobs``: if the request has ``top``, pairs of token id and logarithm for
    each position, best first.
    """

    index: int
    logprob: float
    num_tokens: int
    is_greedy: bool
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
