"""What the server sends over the WebSocket, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import EverstreamError, error_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Created:
    """A kept, empty session."""

    request_id: str
    session: str
    epoch: str
    position: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Started:
    """The generation has its session, which has had ``seq`` events; ``seed`` repeats it."""

    request_id: str
    session: str
    epoch: str
    seq: int
    position: int
    seed: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most probable tokens of a place."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; ``text`` is what became safe to show, often empty.

    ``logprob`` is the natural logarithm of its probability, and ``top_logprobs``
    has the most probable ones, best first, where ``top_logprobs`` was asked for.
    """

    request_id: str
    seq: int
    position: int
    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation; ``text`` is what was still held back."""

    request_id: str
    session: str | None
    seq: int
    position: int
    text: str
    finish_reason: str
    usage: Usage
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    """The session has read what was appended.

    ``logprobs`` has the natural logarithm of each token's probability, if that
    was asked for; the first token of a text has none.
    """

    request_id: str
    session: str
    position: int
    usage: Usage
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Forked:
    """Copies of a session."""

    request_id: str
    session: str
    sessions: tuple[str, ...]
    epoch: str
    position: int


@dataclass(frozen=True, slots=True)
class Rewound:
    """The session's text was cut back; its events continue from ``seq`` in a new epoch."""

    request_id: str
    session: str
    epoch: str
    seq: int
    position: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The events after ``seq`` follow: up to ``last_seq`` at once, and more if it is ``busy``."""

    request_id: str
    session: str
    epoch: str
    seq: int
    last_seq: int
    position: int
    busy: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """The events that were asked for are not available; the session stands at ``last_seq``."""

    request_id: str
    session: str
    epoch: str
    seq: int
    last_seq: int
    position: int
    busy: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Detached:
    """The generation continues by itself."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Migrate:
    """The server is stopping; the session was saved and continues where it comes back."""

    request_id: str
    session: str
    epoch: str
    seq: int
    position: int


@dataclass(frozen=True, slots=True)
class Deleted:
    """The session is gone."""

    request_id: str
    session: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A request not done. ``request_id`` is None for a frame that the server could not read."""

    request_id: str | None
    error: EverstreamError


Event = (
    Created
    | Started
    | Token
    | Finished
    | Appended
    | Forked
    | Rewound
    | Resumed
    | Reset
    | Detached
    | Migrate
    | Deleted
    | Refused
)

_TYPES: dict[str, type[Any]] = {
    "created": Created,
    "started": Started,
    "token": Token,
    "finished": Finished,
    "appended": Appended,
    "forked": Forked,
    "rewound": Rewound,
    "resumed": Resumed,
    "reset": Reset,
    "detached": Detached,
    "migrate": Migrate,
    "deleted": Deleted,
}


def parse_event(frame: dict[str, Any]) -> Event | None:
    """The event of a frame; None for a type that a later server may have added."""
    kind = frame["type"]
    if kind == "error":
        return Refused(frame["request_id"], error_of(frame["status"], frame))
    if kind not in _TYPES:
        return None
    event: Event = from_fields(_TYPES[kind], frame)
    return event


def from_fields(kind: type[T], fields: dict[str, Any]) -> T:
    """A ``kind`` of what ``fields`` has of it; what a later server may have added is left out."""
    known = {name: fields[name] for name in kind.__slots__ if name in fields}  # type: ignore[attr-defined]
    for name, value in known.items():
        if isinstance(value, list):
            known[name] = _frozen(value)
    if "usage" in known:
        known["usage"] = from_fields(Usage, known["usage"])
    if kind is Token and known.get("top_logprobs"):
        known["top_logprobs"] = tuple(from_fields(TopLogprob, one) for one in known["top_logprobs"])
    return kind(**known)


def _frozen(items: list[Any]) -> tuple[Any, ...]:
    return tuple(_frozen(item) if isinstance(item, list) else item for item in items)
