"""The HTTP side of the protocol without any I/O: requests out, answers in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from clients.python.errors import ProtocolError, error_of
from clients.python.events import Usage, from_fields
from clients.python.message import encode

SESSIONS_PATH = "/v1/sessions"
JSON_TYPE = "application/json"
SESSION_TYPE = "application/vnd.everstream.session"

T = TypeVar("T")


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
    epoch: str
    position: int
    seq: int
    busy: bool
    parked: bool
    idle_s: float
    state_bytes: int


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A kept session in the list of them, awake or asleep."""

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
class Call(Generic[T]):
    """One HTTP request, and how its answer is read."""

    method: str
    path: str
    read: Callable[[bytes], T]
    body: bytes | None = None
    body_type: str = JSON_TYPE

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that belong to the body."""
        return {} if self.body is None else {"content-type": self.body_type}

    def result(self, status: int, content: bytes, headers: Mapping[str, str]) -> T:
        """What the answer says; raises the error that it is."""
        if status >= 400:
            raise error_of(status, _json_of(content), headers.get("retry-after"))
        try:
            return self.read(content)
        except (LookupError, TypeError, AttributeError) as error:
            raise ProtocolError(f"no answer of this protocol: {content[:80]!r}") from error


def complete(prompt: str | Sequence[int], **fields: object) -> Call[Completion]:
    """A whole completion at once."""
    return Call("POST", "/v1/completions", _completion, encode({"prompt": prompt, **fields}))


def models() -> Call[list[dict[str, Any]]]:
    """The models that are served."""
    return Call("GET", "/v1/models", _models)


def session_info(session: str) -> Call[SessionInfo]:
    """A session as it is now."""
    return Call("GET", _path(session), _session_info)


def cancel_session(session: str) -> Call[SessionInfo]:
    """Ends what a session runs."""
    return Call("POST", f"{_path(session)}/cancel", _session_info)


def export_session(session: str) -> Call[bytes]:
    """A session as one signed file."""
    return Call("GET", f"{_path(session)}/export", bytes)


def import_session(data: bytes) -> Call[str]:
    """The id of a new session from such a file."""
    return Call("POST", f"{SESSIONS_PATH}/import", _session_id, data, SESSION_TYPE)


def sessions(after: str | None, limit: int) -> Call[SessionPage]:
    """At most ``limit`` of the caller's sessions, by id."""
    query = {"limit": limit} if after is None else {"limit": limit, "after": after}
    return Call("GET", f"{SESSIONS_PATH}?{urlencode(query)}", _page)


def _path(session: str) -> str:
    return f"{SESSIONS_PATH}/{quote(session, safe='')}"


def _json_of(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _completion(content: bytes) -> Completion:
    body = _json_of(content)
    return from_fields(Completion, {**body, **body["choices"][0]})


def _models(content: bytes) -> list[dict[str, Any]]:
    found = _json_of(content)["data"]
    if not isinstance(found, list):
        raise TypeError(found)
    return found


def _session_info(content: bytes) -> SessionInfo:
    return from_fields(SessionInfo, _json_of(content))


def _session_id(content: bytes) -> str:
    return str(_json_of(content)["session"])


def _page(content: bytes) -> SessionPage:
    body = _json_of(content)
    found = [from_fields(ListedSession, one) for one in body["data"]]
    return SessionPage(found, found[-1].session if body["has_more"] and found else None)
