"""What the server answers over HTTP, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .events import Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer of ``POST /v1/completions``."""

    text: str
    finish_reason: str
    session: str | None
    seed: int
    position: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A kept session as the server sees it.

    ``parked``: what it runs rests until somebody reads it.
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
        """All of it."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A kept session in the list of them, in memory or hibernated."""

    session: str
    epoch: str
    position: int
    seq: int
    busy: bool
    stored_bytes: int


class SessionPage(NamedTuple):
    """Some sessions; more come ``after`` the last of them, or none where it is None."""

    sessions: list[ListedSession]
    after: str | None


@dataclass(frozen=True, slots=True)
class Score:
    """How likely one continuation is: natural logarithms, of the whole and of each token.

    ``is_greedy``: each of its tokens is the most probable one where it stands.
    ``top_logprobs`` has pairs of id and logarithm for each token, best first,
    where ``top`` was given.
    """

    index: int
    logprob: float
    num_tokens: int
    is_greedy: bool
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
