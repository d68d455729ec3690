"""What can go wrong, as one tree. Codes and statuses are those of the server's protocol."""

from __future__ import annotations

import contextlib
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
    """A value that the server refuses (400, 413), or that no JSON can carry."""


class AuthenticationError(EverstreamError):
    """No key or a wrong one (401), or a foreign origin (403)."""


class NotFound(EverstreamError):
    """No such model or route (404, 405)."""


class SessionNotFound(NotFound):
    """No such session: never there, deleted, expired, or another key's."""


class SessionBusy(EverstreamError):
    """The session runs another request (409)."""


class CapacityExhausted(EverstreamError):
    """The server is full or about to stop (429, 503); try again after ``retry_after_s``."""

    retry_after_s: float | None = None


class InternalServerError(EverstreamError):
    """The server failed (500), or this request failed in it."""


class Cancelled(EverstreamError):
    """The request was ended before it was done, as when its session is deleted."""


class ConnectionLost(EverstreamError):
    """The connection ended before the answer did, gave no event in time, or could not be made."""


class ReaderTooSlow(EverstreamError):
    """Events were left unread for so long that the request was given up."""


class ProtocolError(EverstreamError):
    """What answered is not an Everstream server, or not of this protocol."""


_BY_CODE: dict[str | None, type[EverstreamError]] = {
    "session_not_found": SessionNotFound,
    "reader_too_slow": ReaderTooSlow,
}
_BY_STATUS: dict[int, type[EverstreamError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFound,
    405: NotFound,
    409: SessionBusy,
    429: CapacityExhausted,
    503: CapacityExhausted,
}


def error_of(status: int, body: Any, retry_after: str | None = None) -> EverstreamError:
    """The error for an answer of ``status`` whose JSON is ``body``."""
    details = body.get("error") if isinstance(body, dict) else None
    if not isinstance(details, dict):
        details = {"message": f"the server answered {status}"}
    code = details.get("code")
    by_class = InvalidRequest if 400 <= status < 500 else InternalServerError
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, by_class)
    error = kind(str(details.get("message")), code, details.get("param"), status)
    if isinstance(error, CapacityExhausted) and retry_after is not None:
        with contextlib.suppress(ValueError):  # a proxy may name a date
            error.retry_after_s = float(retry_after)
    return error
