"""The error tree of the client. Codes and statuses are those of the server's protocol."""

from __future__ import annotations

import contextlib
from typing import Any

STOPPING = "the server is stopping; the session was saved"


class EverstreamError(Exception):
    """The base of all errors of this client.

    ``code`` is the server's stable code, ``param`` the field at fault, and
    ``status`` the HTTP status; each is None if the server did not send it.
    ``retry_after_s`` is how many seconds the server asks to wait before a retry, if it does.
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
    """The server refuses a value (400, 413), or JSON cannot represent it."""


class AuthenticationError(EverstreamError):
    """The key is missing or wrong (401), or the key, origin or host is not allowed (403)."""


class NotFound(EverstreamError):
    """The model, named state or route does not exist (404, 405)."""


class SessionNotFound(NotFound):
    """The session does not exist, was deleted, has expired or belongs to another key (404)."""


class PrefixNotFound(NotFound):
    """The server does not have this prefix, or has it no more (404). Send the whole prompt."""


class SessionBusy(EverstreamError):
    """The session runs another request (409). Also other conflicts without a class here."""


class SessionAttached(EverstreamError):
    """Another client reads the session (409), or has taken it over from this one."""


class KeyInUse(EverstreamError):
    """The first request with the same idempotency key still runs (409). Retry later."""


class HistoryGone(EverstreamError):
    """The requested position is before the beginning of the session's log (410)."""


class SnapshotMismatch(EverstreamError):
    """The session belongs to another model, tokenizer, backend, dtype or state dtype (409)."""


class SessionBroken(EverstreamError):
    """The session's data in the store is damaged (410). It can only be deleted."""


class SessionMigrated(EverstreamError):
    """The server has saved the session and released it (503). Resume it later."""


class SessionReset(EverstreamError):
    """The events after the last known one are not available; the message says why.

    To continue from the present state, call `resume` with the attributes
    ``session``, ``last_seq`` and ``epoch``.
    """

    def __init__(self, reason: str, session: str, epoch: str, last_seq: int) -> None:
        super().__init__(reason, "reset")
        self.session, self.epoch, self.last_seq = session, epoch, last_seq


class CapacityExhausted(EverstreamError):
    """The server is full, limits the key, or is stopping (429, 503). Retry later."""


class StoreFailed(EverstreamError):
    """The server's store is unavailable (503). Retry later."""


class StoreFull(StoreFailed):
    """The server's store has no space left (507)."""


class InternalServerError(EverstreamError):
    """The server failed (500), or the request failed while it ran."""


class Cancelled(EverstreamError):
    """The request was cancelled before it was done, for example by a delete of its session."""


class ConnectionLost(EverstreamError):
    """The connection failed, ended before the answer did, or delivered no event in time."""


class ReaderTooSlow(EverstreamError):
    """The request was ended because too many of its events were unread."""


class ProtocolError(EverstreamError):
    """The answer does not follow the protocol; it may come from another kind of server."""


_BY_CODE: dict[str | None, type[EverstreamError]] = {
    "session_not_found": SessionNotFound,
    "prefix_not_found": PrefixNotFound,
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
    """Returns the error for an answer with ``status`` and the JSON value ``body``.

    The code determines the class, else the status. ``retry_after_s`` of the body, or the
    header ``retry_after``, says how many seconds to wait before a retry.
    """
    details = body.get("error") if isinstance(body, dict) else None
    if not isinstance(details, dict):
        details = {"message": f"the server answered {status}"}
    code = details.get("code")
    by_class = InvalidRequest if 400 <= status < 500 else InternalServerError
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, by_class)
    error = kind(str(details.get("message")), code, details.get("param"), status)
    seconds = details.get("retry_after_s", retry_after)
    if seconds is not None:
        with contextlib.suppress(TypeError, ValueError):  # the header of a proxy may be a date
            error.retry_after_s = float(seconds)
    return error
