"""The protocol without any I/O: messages out, events in. Both clients are thin around it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict
from urllib.parse import quote, urlsplit, urlunsplit

from websockets.exceptions import InvalidHandshake, InvalidStatus

from clients.python.errors import ConnectionLost, EverstreamError, InternalServerError, error_of
from clients.python.events import Event, Finished, Refused, Usage, parse_event

STREAM_PATH = "/v1/stream"


class Sampling(TypedDict, total=False):
    """Options of a generation; the server's defaults hold for what is left out."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
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
    body: Mapping[str, Any] | None = None


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

    def message(self, kind: str, **fields: object) -> tuple[str, str]:
        """A new message's request id and JSON; fields that are None are left out."""
        request_id = f"r{next(self._numbers)}"
        given = {name: value for name, value in fields.items() if value is not None}
        return request_id, json.dumps({"type": kind, "request_id": request_id, **given})

    @staticmethod
    def cancel(request_id: str) -> str:
        """The message that ends a running request."""
        return json.dumps({"type": "cancel", "request_id": request_id})

    @staticmethod
    def event(frame: str | bytes) -> Event | None:
        """The event in a frame, or None for one of an unknown type."""
        return parse_event(json.loads(frame))

    @staticmethod
    def checked(event: Event) -> Event:
        """``event`` itself; raises what it reports where it reports a failure."""
        if isinstance(event, Refused):
            raise event.error
        if isinstance(event, Finished) and event.finish_reason == "error":
            raise InternalServerError(event.error or "the request failed")
        return event

    # HTTP

    @staticmethod
    def complete(prompt: str | Sequence[int], **fields: object) -> Call:
        given = {name: value for name, value in fields.items() if value is not None}
        return Call("POST", "/v1/completions", {"prompt": prompt, **given})

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
        return body

    @staticmethod
    def completion(body: Any) -> Completion:
        """The answer to `complete`."""
        choice = body["choices"][0]
        usage = Usage(**body["usage"])
        rest = {name: body[name] for name in ("session", "seed", "position")}
        return Completion(choice["text"], choice["finish_reason"], usage=usage, **rest)


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
