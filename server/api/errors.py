"""Errors of the wire itself, next to the engine's, and the one table code -> status and type."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from server.api.schemas.responses import ErrorDetail
from server.errors import RequestError


class InvalidApiKey(RequestError):
    """No key, or none that this server knows."""

    code = "invalid_api_key"
    message = (
        "no API key, or none that this server knows; "
        "send Authorization: Bearer KEY, api-key: KEY or x-api-key: KEY"
    )


class ForeignOrigin(RequestError):
    """A page from elsewhere that the operator has not allowed."""

    code = "foreign_origin"
    message = "pages of this origin may not call this server"


class ForeignHost(RequestError):
    """Asked by a name that the operator has not given."""

    code = "foreign_host"
    message = "this server answers to localhost, to IP addresses and to the names of --allow-host"


class SessionMigrated(RequestError):
    """The server is about to stop and has saved the session: it continues where it comes back."""

    code = "migrated"
    message = "the server is stopping; the session was saved, resume it"
    param = "session"


class RouteNotFound(RequestError):
    """No such path."""

    code = "not_found"
    message = "no such route; see /docs"

    @classmethod
    def at(cls, path: str) -> RouteNotFound:
        """With what to use instead of a part of OpenAI's API that clients look for."""
        if path == "/v1/conversations" or path.startswith("/v1/conversations/"):
            return cls(
                "there are no conversation objects; use previous_response_id of /v1/responses"
            )
        return cls()


class MethodNotAllowed(RequestError):
    """The path is right and the method is not."""

    code = "method_not_allowed"
    message = "this route has other methods; see /docs"


class RequestTimeout(RequestError):
    """The client sends its body too slowly."""

    code = "request_timeout"
    message = "the body did not arrive in time"


class BodyTooLarge(RequestError):
    """More bytes than the operator allows."""

    code = "body_too_large"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"the body is larger than {max_bytes} bytes")


class UnsupportedEncoding(RequestError):
    """A body that is compressed: its size is known when it is too late."""

    code = "unsupported_encoding"
    message = "Content-Encoding: send the body as it is, without compression"


class HeadTooLarge(RequestError):
    """More bytes of headers than any client needs."""

    code = "head_too_large"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"the headers are larger than {max_bytes} bytes")


class TooManyConnections(RequestError):
    """The bound on requests and sockets is reached."""

    code = "too_many_connections"
    message = "the server has as many connections as it takes"


#: The message that a client gets for an internal error.
FAILED = "the server failed; it has logged why"

#: A message may quote what a client has sent, and no answer repeats much of that.
MAX_MESSAGE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a code shows: HTTP status, OpenAI's error type, seconds for ``Retry-After``."""

    status: int
    type: str
    retry_after_s: int | None = None


OUTCOMES = {
    "invalid_value": Outcome(400, "invalid_request_error"),
    "context_length_exceeded": Outcome(400, "invalid_request_error"),
    "import_refused": Outcome(400, "invalid_request_error"),
    "model_broken": Outcome(400, "invalid_request_error"),
    "invalid_api_key": Outcome(401, "authentication_error"),
    "foreign_origin": Outcome(403, "permission_error"),
    "foreign_host": Outcome(403, "permission_error"),
    "loading_refused": Outcome(403, "permission_error"),
    "scope_missing": Outcome(403, "permission_error"),
    "session_not_found": Outcome(404, "invalid_request_error"),
    "model_not_found": Outcome(404, "invalid_request_error"),
    "state_not_found": Outcome(404, "invalid_request_error"),
    "prefix_not_found": Outcome(404, "invalid_request_error"),
    "response_not_found": Outcome(404, "invalid_request_error"),
    "previous_response_not_found": Outcome(400, "invalid_request_error"),
    "not_found": Outcome(404, "invalid_request_error"),
    "method_not_allowed": Outcome(405, "invalid_request_error"),
    "request_timeout": Outcome(408, "invalid_request_error"),
    "reader_too_slow": Outcome(408, "invalid_request_error"),
    "session_busy": Outcome(409, "invalid_request_error"),
    "session_attached": Outcome(409, "invalid_request_error"),
    "state_fixed": Outcome(409, "invalid_request_error"),
    "too_many_states": Outcome(409, "invalid_request_error"),
    "model_exists": Outcome(409, "invalid_request_error"),
    "model_changing": Outcome(409, "invalid_request_error", retry_after_s=2),
    "model_in_use": Outcome(409, "invalid_request_error", retry_after_s=5),
    "last_model": Outcome(409, "invalid_request_error"),
    "store_in_use": Outcome(409, "invalid_request_error"),
    "key_in_use": Outcome(409, "invalid_request_error", retry_after_s=1),
    "snapshot_mismatch": Outcome(409, "invalid_request_error"),
    "history_gone": Outcome(410, "invalid_request_error"),
    "session_broken": Outcome(410, "invalid_request_error"),
    "snapshot_broken": Outcome(410, "server_error"),
    "body_too_large": Outcome(413, "invalid_request_error"),
    "unsupported_encoding": Outcome(415, "invalid_request_error"),
    "record_refused": Outcome(422, "invalid_request_error"),
    "queue_full": Outcome(429, "rate_limit_error", retry_after_s=1),
    "rate_limited": Outcome(429, "rate_limit_error"),
    "too_many_followers": Outcome(429, "rate_limit_error", retry_after_s=5),
    "head_too_large": Outcome(431, "invalid_request_error"),
    "internal_error": Outcome(500, "server_error"),
    "store_failed": Outcome(503, "server_error", retry_after_s=2),
    "store_lost": Outcome(503, "server_error", retry_after_s=2),
    "session_elsewhere": Outcome(503, "server_error", retry_after_s=1),
    "store_taken": Outcome(503, "server_error", retry_after_s=2),
    "out_of_memory": Outcome(503, "server_error", retry_after_s=2),
    "migrated": Outcome(503, "server_error", retry_after_s=1),
    "capacity_exhausted": Outcome(503, "server_error", retry_after_s=5),
    "draining": Outcome(503, "server_error", retry_after_s=5),
    "too_many_connections": Outcome(503, "server_error", retry_after_s=5),
    "store_full": Outcome(507, "server_error", retry_after_s=30),
}


def outcome(error: RequestError) -> Outcome:
    """The row of ``error``; a code without one is our own mistake and says so."""
    return OUTCOMES.get(error.code, OUTCOMES["internal_error"])


def error_object(error: RequestError) -> ErrorDetail:
    """The value of ``error`` in every answer that carries one."""
    fields: ErrorDetail = {
        "message": error.message[:MAX_MESSAGE_CHARS],
        "type": outcome(error).type,
        "param": error.param,
        "code": error.code,
    }
    if (exact_s := getattr(error, "retry_after_s", None)) is not None:
        fields["retry_after_s"] = exact_s
    return fields


def error_body(error: RequestError) -> bytes:
    """The body of an answer that is an error."""
    return orjson.dumps({"error": error_object(error)})


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How an API answers with errors: the ``body``, and the HTTP ``status``."""

    body: Callable[[RequestError], bytes]
    status: Callable[[RequestError], int]


#: OpenAI's, which is that of our own routes too.
USUAL_ERRORS = ErrorShape(error_body, lambda error: outcome(error).status)


def error_headers(error: RequestError) -> dict[str, str]:
    """Headers that belong to the status of ``error``."""
    headers = {"content-type": "application/json", "x-content-type-options": "nosniff"}
    retry_after_s = getattr(error, "retry_after_s", outcome(error).retry_after_s)
    if retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(retry_after_s))  # the header has whole seconds
    if outcome(error).status == 401:
        headers["www-authenticate"] = "Bearer"
    if outcome(error).status == 415:
        headers["accept-encoding"] = "identity"
    return headers
