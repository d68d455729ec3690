"""Errors as Anthropic's API shows them: another body, and a word for each status."""

from __future__ import annotations

import orjson

from server.api.errors import ErrorShape, error_object, outcome
from server.errors import RequestError

#: Of these Anthropic's clients know that others can be served, and come back.
OVERLOADED = frozenset({"capacity_exhausted", "draining", "too_many_connections", "out_of_memory"})
OVERLOADED_STATUS = 529

#: By this the Python package sends a conversation again as a whole, and names no thread any more.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    410: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    OVERLOADED_STATUS: "overloaded_error",
}


def status_of(error: RequestError) -> int:
    """The HTTP status of ``error``."""
    return OVERLOADED_STATUS if error.code in OVERLOADED else outcome(error).status


def anthropic_error(error: RequestError) -> dict[str, object]:
    """The object of an error, with our own ``code`` and ``param`` next to Anthropic's fields."""
    ours = error_object(error)
    shown: dict[str, object] = {
        "type": _TYPES.get(status_of(error), "api_error"),
        "message": ours["message"],
        "code": ours["code"],
        "param": ours["param"],
    }
    if error.param == "thread":
        shown["details"] = NO_THREADS
    return {"type": "error", "error": shown}


ERRORS = ErrorShape(lambda error: orjson.dumps(anthropic_error(error)), status_of)
