"""The WebSocket protocol, without I/O: builds messages and parses events."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, TypeVar
from urllib.parse import SplitResult, urlsplit, urlunsplit

from websockets.exceptions import InvalidHandshake, InvalidStatus

from .errors import (
    STOPPING,
    Cancelled,
    ConnectionLost,
    EverstreamError,
    InternalServerError,
    ProtocolError,
    SessionMigrated,
    SessionReset,
    error_of,
)
from .events import (
    Event,
    Finished,
    Migrate,
    Refused,
    Reset,
    parse_event,
)
from .message import encode
from .request import EndMessage, Request

STREAM_PATH = "/v1/stream"

Answer = TypeVar("Answer", bound=Event)


class Sampling(TypedDict, total=False):
    """The options of a generation. The server has a default for each."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logit_bias: Mapping[int, float] | Mapping[str, float]
    top_logprobs: int
    response_format: Mapping[str, object]
    speculation: Literal["auto", "off"]


class Protocol:
    """Builds messages and parses events.

    ``url`` is the server's HTTP address, such as ``http://127.0.0.1:8000``. Raises ValueError
    for any other address, and for an ``api_key`` that is not printable ASCII.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = _address(url)
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key must be printable ASCII")
        path = parts.path.rstrip("/")
        self.base_url = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        scheme = "wss" if parts.scheme == "https" else "ws"
        self.stream_url = urlunsplit((scheme, parts.netloc, path + STREAM_PATH, "", ""))
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._numbers = itertools.count(1)

    def message(self, kind: str, **fields: object) -> tuple[str, bytes]:
        """Returns the request id and JSON of a new message, without fields that are None."""
        request_id = f"r{next(self._numbers)}"
        return request_id, encode({"type": kind, "request_id": request_id, **fields})

    def request(self, kind: str, **fields: object) -> Request:
        """Builds a message and notes how it can be recovered if its connection is lost."""
        request_id, message = self.message(kind, **fields)
        is_kept = fields.get("session") is not None or bool(fields.get("keep"))
        is_repeatable = fields.get("idempotency_key") is not None or kind == "resume"
        return Request(request_id, kind, message, is_kept, is_repeatable)

    @staticmethod
    def ending(end_message: EndMessage) -> bytes:
        """Encodes the message that cancels or detaches a running request."""
        return encode({"type": end_message.kind, "request_id": end_message.request_id})

    @staticmethod
    def fed(text: str | Sequence[int]) -> dict[str, object]:
        """Returns the field of an ``append``: text or token ids."""
        return {"text" if isinstance(text, str) else "tokens": text}

    @staticmethod
    def event(frame: str | bytes) -> Event | None:
        """Parses a frame. Returns None for an unknown type of event.

        Raises `ProtocolError` if the frame is not an event.
        """
        try:
            return parse_event(json.loads(frame))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"the frame is not an event: {frame[:80]!r}") from error

    @staticmethod
    def checked(event: Event) -> Event:
        """Returns ``event``, or raises the failure that it reports."""
        if isinstance(event, Refused):
            raise event.error
        if isinstance(event, Finished) and event.finish_reason == "error":
            raise InternalServerError(event.error or "the request failed")
        if isinstance(event, Reset):
            raise SessionReset(event.reason, event.session, event.epoch, event.last_seq)
        if isinstance(event, Migrate):
            raise SessionMigrated(STOPPING, "migrated")
        return event

    @staticmethod
    def expected(event: Event, kind: type[Answer]) -> Answer:
        """Returns ``event`` if it is a ``kind``, else raises."""
        if isinstance(event, kind):
            return event
        if isinstance(event, Finished):
            raise Cancelled("the request was cancelled")
        raise ProtocolError(f"{event} is not an answer to this request")


def _address(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # an unclosed bracket, or a port out of range
        pass
    raise ValueError(f"url must be http://host[:port] or https://..., not {url!r}")


def handshake_error(error: InvalidHandshake) -> EverstreamError:
    """Returns the error of a refused handshake, with the server's message if it has one."""
    if not isinstance(error, InvalidStatus):
        return ConnectionLost(f"the handshake failed: {error}")
    response = error.response
    try:
        body = json.loads(response.body or b"null")
    except ValueError:
        body = None
    return error_of(response.status_code, body, response.headers.get("retry-after"))
