"""The protocol without any I/O: messages out, events in. Both clients are thin around it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from websockets.exceptions import InvalidHandshake, InvalidStatus

from clients.python.errors import (
    Cancelled,
    ConnectionLost,
    EverstreamError,
    InternalServerError,
    InvalidRequest,
    ProtocolError,
    error_of,
)
from clients.python.events import (
    Event,
    Finished,
    Refused,
    Started,
    Token,
    Usage,
    from_fields,
    parse_event,
)

STREAM_PATH = "/v1/stream"
JSON_HEADERS = {"content-type": "application/json"}

Answer = TypeVar("Answer", bound=Event)


class Sampling(TypedDict, total=False):
    """Options of a generation; the server's defaults hold for what is left out."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool


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
    """A kept session as the server sees it."""

    session: str
    position: int
    seq: int
    busy: bool
    idle_s: float
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request."""

    method: str
    path: str
    body: bytes | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that belong to the body."""
        return {} if self.body is None else JSON_HEADERS


class Protocol:
    """Builds messages and calls, and reads what comes back.

    ``url`` is the server's HTTP address, such as ``http://127.0.0.1:8000``.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url must be http://host[:port] or https://..., not {url!r}")
        path = parts.path.rstrip("/")
        self.base_url = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        scheme = "wss" if parts.scheme == "https" else "ws"
        self.stream_url = urlunsplit((scheme, parts.netloc, path + STREAM_PATH, "", ""))
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._numbers = itertools.count(1)

    # WebSocket

    def message(self, kind: str, **fields: object) -> tuple[str, bytes]:
        """A new message's request id and JSON; fields that are None are left out."""
        request_id = f"r{next(self._numbers)}"
        return request_id, _encode({"type": kind, "request_id": request_id, **fields})

    @staticmethod
    def cancel(request_id: str) -> bytes:
        """The message that ends a running request."""
        return _encode({"type": "cancel", "request_id": request_id})

    @staticmethod
    def event(frame: str | bytes) -> Event | None:
        """The event in a frame, or None for one of an unknown type. Raises `ProtocolError`."""
        try:
            return parse_event(json.loads(frame))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"a frame that is no event: {frame[:80]!r}") from error

    @staticmethod
    def checked(event: Event) -> Event:
        """``event`` itself; raises what it reports where it reports a failure."""
        if isinstance(event, Refused):
            raise event.error
        if isinstance(event, Finished) and event.finish_reason == "error":
            raise InternalServerError(event.error or "the request failed")
        return event

    @staticmethod
    def expected(event: Event, kind: type[Answer]) -> Answer:
        """``event`` as the ``kind`` of answer that its request has."""
        if isinstance(event, kind):
            return event
        if isinstance(event, Finished):
            raise Cancelled("the request was cancelled")
        raise ProtocolError(f"{event} is no answer to this request")

    # HTTP

    @staticmethod
    def complete(prompt: str | Sequence[int], **fields: object) -> Call:
        return Call("POST", "/v1/completions", _encode({"prompt": prompt, **fields}))

    @staticmethod
    def session(session: str, method: str = "GET") -> Call:
        return Call(method, f"/v1/sessions/{quote(session, safe='')}")

    @staticmethod
    def answer(status: int, content: bytes, headers: Mapping[str, str]) -> Any:
        """The JSON of an answer; raises the error that it is."""
        try:
            body = json.loads(content) if content else None
        except ValueError:
            body = None
        if status >= 400:
            raise error_of(status, body, headers.get("retry-after"))
        if not isinstance(body, dict):
            raise ProtocolError(f"an answer that is no JSON object: {content[:80]!r}")
        return body

    @staticmethod
    def completion(body: Any) -> Completion:
        """The answer to `complete`."""
        try:
            return from_fields(Completion, {**body, **body["choices"][0]})
        except (LookupError, TypeError) as error:
            raise ProtocolError("the answer is no completion") from error

    @staticmethod
    def session_info(body: Any) -> SessionInfo:
        """The answer to `session`."""
        try:
            return from_fields(SessionInfo, body)
        except TypeError as error:
            raise ProtocolError("the answer is no session") from error

    @staticmethod
    def models(body: Any) -> list[dict[str, Any]]:
        """The list in the answer of ``/v1/models``."""
        models = body.get("data")
        if not isinstance(models, list):
            raise ProtocolError("the answer is no list of models")
        return models


class Progress:
    """How far a generation has come, as its reader sees it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.started: Started | None = None
        self.finished: Finished | None = None

    def _note(self, event: Event) -> Token | Finished | None:
        """Remembers ``event`` and gives it back if it has text to show."""
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Finished):
            self.finished = event
        return event if isinstance(event, Token | Finished) else None


def handshake_error(error: InvalidHandshake) -> EverstreamError:
    """Why a WebSocket was refused: the server's own words where it said any."""
    if not isinstance(error, InvalidStatus):
        return ConnectionLost(f"the handshake failed: {error}")
    response = error.response
    try:
        body = json.loads(response.body or b"null")
    except ValueError:
        body = None
    return error_of(response.status_code, body, response.headers.get("retry-after"))


def _encode(fields: Mapping[str, object]) -> bytes:
    """Fields as JSON, without those that are None. Raises `InvalidRequest` that names a field."""
    members = (_member(name, value) for name, value in fields.items() if value is not None)
    return b"{" + b",".join(members) + b"}"


def _member(name: str, value: object) -> bytes:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, default=list)
        return f'"{name}":{text}'.encode()
    except (TypeError, ValueError) as error:
        message = f"{name}: cannot be sent as JSON: {error}"
        raise InvalidRequest(message, "invalid_value", name) from error
