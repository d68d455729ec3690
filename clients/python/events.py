"""The events that the server sends over the WebSocket, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import EverstreamError, error_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Created:
    """A kept session was created, empty or with a named state."""

    request_id: str
    session: str
    epoch: str
    position: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Started:
    """The generation begins after event ``seq`` of its session.

    The same request with ``seed`` generates the same tokens.
    """

    request_id: str
    session: str
    epoch: str
    seq: int
    position: int
    seed: int


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most probable tokens at a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    ``text`` is the text that is complete with this token; it is often empty. If the
    request has ``top_logprobs``, ``logprob`` is the natural logarithm of the token's
    probability, and ``top_logprobs`` are the most probable tokens, best first.
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
    """The end of a generation; ``text`` is the text that the tokens did not contain yet.

    ``session`` is None if the session ended with the request. ``prefix`` is the handle of the
    prompt, if the request has ``return_prefix`` and the server keeps the prompt's state.
    """

    request_id: str
    session: str | None
    seq: int
    position: int
    text: str
    finish_reason: str
    usage: Usage
    error: str | None = None
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    """The session has read the appended text.

    If the request has ``logprobs``, the field contains the natural logarithm of each
    token's probability. The first token of a session has no entry.
    """

    request_id: str
    session: str
    position: int
    usage: Usage
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Forked:
    """The session was copied."""

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
    """The events after ``seq`` follow.

    Those up to ``last_seq`` exist already. If ``busy``, those of the running request
    come after them.
    """

    request_id: str
    session: str
    epoch: str
    seq: int
    last_seq: int
    position: int
    busy: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """The requested events are not available; the session's last event is ``last_seq``."""

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
    """The generation continues without a reader."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Migrate:
    """The session was saved and leaves the server, for example because the server stops."""

    request_id: str
    session: str
    epoch: str
    seq: int
    position: int


@dataclass(frozen=True, slots=True)
class Deleted:
    """The session was deleted."""

    request_id: str
    session: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A request has failed. ``request_id`` is None if the server could not parse the frame."""

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
    """Returns the event of a frame, or None for a type of a later server."""
    kind = frame["type"]
    if kind == "error":
        return Refused(frame["request_id"], error_of(frame["status"], frame))
    if kind not in _TYPES:
        return None
    event: Event = from_fields(_TYPES[kind], frame)
    return event


def from_fields(kind: type[T], fields: dict[str, Any]) -> T:
    """Builds a ``kind`` from ``fields`` and ignores fields of a later server."""
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
