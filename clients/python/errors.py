"""What can go wrong, as one tree. Codes and statuses are those of the server's protocol."""

from __future__ import annotations

from typing import Any


class EverstreamError(Exception):
    """Base of all errors of this client.

    ``code`` is the server's stable code, ``param`` the field at fault, if one
    is, and ``status`` the HTTP status; None where the server said nothing.
    """

    def __init__(
        self,
        message: str,
        code: str | None = None,
        param: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status


class InvalidRequest(EverstreamError):
    """The server refused a value (400, 413)."""


class AuthenticationError(EverstreamError):
    """No key or a wrong one (401), or a foreign origin (403)."""


class NotFound(EverstreamError):
    """No such session, model or route (404)."""


class SessionBusy(EverstreamError):
    """The session runs another request (409)."""


class CapacityExhausted(EverstreamError):
    """The server is full or about to stop (429, 503); try again after ``retry_after_s``."""

    retry_after_s: float | None = None


class InternalServerError(EverstreamError):
    """The server failed (500), or this request failed in it."""


class ConnectionLost(EverstreamError):
    """The connection ended before the answer did, or could not be made."""


_BY_STATUS: dict[int, type[EverstreamError]] = {
    400: InvalidRequest,
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFound,
    405: NotFound,
    409: SessionBusy,
    413: InvalidRequest,
    429: CapacityExhausted,
    503: CapacityExhausted,
}


def error_of(status: int, body: Any, retry_after: str | None = None) -> EverstreamError:
    """The error for an answer of ``status`` whose JSON is ``body``."""
    details = body.get("error") if isinstance(body, dict) else None
    if not isinstance(details, dict):
        details = {"message": f"the server answered {status}"}
    kind = _BY_STATUS.get(status, InternalServerError)
    error = kind(str(details.get("message")), details.get("code"), details.get("param"), status)
    if isinstance(error, CapacityExhausted) and retry_after is not None:
        error.retry_after_s = float(retry_after)
    return error
