"""Resuming a session: the client's cursor, and whether the events after it can be sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

from server.engine.types import Finished, SessionInfo, TokenEvent

#: Events of a page that is read from the log.
PAGE_EVENTS = 512

#: Why a cursor of another epoch has no place in the session's log.
REWOUND = "the session was rewound"
OTHER_STORE = "the server's store is another one than before, such as a restored copy"


@dataclass(frozen=True, slots=True)
class Cursor:
    """The last event that a client has. ``epoch`` None is the present one."""

    last_seq: int
    epoch: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """The first events after ``after_seq``; with ``is_gone`` the log begins later."""

    after_seq: int
    events: tuple[TokenEvent | Finished, ...]
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class Resumed:
    """A session with a new reader: see `server.sessions.sessions.Sessions.resume`.

    ``reset`` says why the events after the cursor are not available: then the events after
    ``info.seq`` follow. ``first_page`` are the first events after ``first_seq``, read already.
    """

    info: SessionInfo
    first_seq: int
    reset: str | None
    first_page: tuple[TokenEvent | Finished, ...] = ()


def resumed(info: SessionInfo, cursor: Cursor, epoch_name: str, page: Page) -> Resumed:
    """The session as ``info`` says, read from ``cursor`` on, where ``page`` begins.

    ``epoch_name`` is that of its epoch.
    """
    if cursor.epoch is not None and cursor.epoch != epoch_name:
        is_rewound = _store_of(cursor.epoch) == _store_of(epoch_name)
        return Resumed(info, info.seq, REWOUND if is_rewound else OTHER_STORE)
    if cursor.last_seq > info.seq:
        return Resumed(info, info.seq, "the session has not had that many events")
    if page.is_gone:
        return Resumed(info, info.seq, "the log does not reach back that far")
    return Resumed(info, cursor.last_seq, None, page.events)


def resumed_elsewhere(session: str, cursor: Cursor, epoch_name: str) -> Resumed | None:
    """A reset, for a session that the store does not have and another store may have had.

    None where the cursor names no store or this one, to which ``epoch_name`` belongs.
    """
    if cursor.epoch is None or _store_of(cursor.epoch) == _store_of(epoch_name):
        return None
    lost = SessionInfo(session, 0, 0, False, 0.0, 0)
    return Resumed(lost, 0, OTHER_STORE)


def renamed(event: TokenEvent | Finished, request_id: str) -> TokenEvent | Finished:
    """``event`` as one of the request ``request_id``."""
    if isinstance(event, TokenEvent):
        return event._replace(request_id=request_id)
    return replace(event, request_id=request_id)


def _store_of(epoch_name: str) -> str:
    return epoch_name.rpartition("-")[0]
