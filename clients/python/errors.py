"""What can go wrong, as one tree. Codes and statuses are those of the server's protocol."""

from __future__ import annotations

import contextlib
from typing import Any

STOPPING = "the server is stopping; the session was saved"


class EverstreamError(Exception):
    """Base of all errors of this client.

    ``code`` is the server's stable code, ``param`` the field at fault, if one
    is, and ``status`` the HTTP status; None where the server said nothing.
    ``retry_after_s`` is when to try again, where the server knows it.
    """

    retry_after_s: float | None = None

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
    """No such model, named state or route (404, 405)."""


class SessionNotFound(NotFound):
    """No such session: never there, deleted, expired, or another key's."""


class SessionBusy(EverstreamError):
    """The session runs another request (409)."""


class SessionAttached(EverstreamError):
    """The session's events have another reader (409), or have one now: it was taken over."""


class KeyInUse(EverstreamError):
    """The first request under the same idempotency key is still under way (409); try again."""


class HistoryGone(EverstreamError):
    """What is asked for lies before the part of the session's log that is kept (410)."""


class SnapshotMismatch(EverstreamError):
    """The session belongs to another model, or to another way of running it (409)."""


class SessionBroken(EverstreamError):
    """What the store has of the session is damaged (410): it can only be deleted."""


class SessionMigrated(EverstreamError):
    """The server is stopping and has saved the session: resume it where it comes back."""


class SessionReset(EverstreamError):
    """The events after the last known one are not available; the message says why.

    To continue from the session as it is now, `resume` it from these.
    """

    def __init__(self, reason: str, session: str, epoch: str, last_seq: int) -> None:
        super().__init__(reason, "reset")
        self.session, self.epoch, self.last_seq = session, epoch, last_seq


class CapacityExhausted(EverstreamError):
    """The server is full or about to stop (429, 503); try again later."""


class StoreFailed(EverstreamError):
    """The server cannot keep sessions at present (503); try again later."""


class StoreFull(StoreFailed):
    """The server has no room for more of kept sessions (507)."""


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
    "session_attached": SessionAttached,
    "key_in_use": KeyInUse,
    "history_gone": HistoryGone,
    "snapshot_mismatch": SnapshotMismatch,
    "session_broken": SessionBroken,
    "snapshot_broken": SessionBroken,
    "migrated": SessionMigrated,
    "store_failed": StoreFailed,
    "store_lost": StoreFailed,
    "store_taken": StoreFailed,
    "store_full": StoreFull,
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
    if retry_after is not None:
        with contextlib.suppress(ValueError):  # a proxy may name a date
            error.retry_after_s = float(retry_after)
    return error
