"""What the server sends over the WebSocket, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from clients.python.errors import EverstreamError, error_of

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
    position: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Started:
    """The generation has its session; ``seed`` repeats it."""

    request_id: str
    session: str
    position: int
    seed: int


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; ``text`` is what became safe to show, often empty."""

    request_id: str
    seq: int
    position: int
    token_id: int
    text: str


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
    """The session has read what was appended."""

    request_id: str
    session: str
    position: int
    usage: Usage


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


Event = Created | Started | Token | Finished | Appended | Deleted | Refused

_TYPES: dict[str, type[Any]] = {
    "created": Created,
    "started": Started,
    "token": Token,
    "finished": Finished,
    "appended": Appended,
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
    if "usage" in known:
        known["usage"] = from_fields(Usage, known["usage"])
    return kind(**known)
