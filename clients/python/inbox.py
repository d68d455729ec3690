"""The unread events of one request, over all its connections. Without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .backoff import Attempts
from .errors import (
    CapacityExhausted,
    ConnectionLost,
    EverstreamError,
    KeyInUse,
    ProtocolError,
    SessionAttached,
    SessionMigrated,
    StoreFailed,
)
from .events import Detached, Event, Finished, Migrate, Refused, Reset, Resumed, Started, Token
from .request import Cursor, EndMessage, Request

#: Transient errors. The server may not know yet that our last connection has ended: then that
#: connection is the other reader, or still holds the idempotency key.
PASSING = (CapacityExhausted, ConnectionLost, KeyInUse, SessionAttached, SessionMigrated)
#: The server has not executed the request and is about to stop: retry on the next connection.
DRAINING = "draining"
LEAVING = (DRAINING, "store_taken")
PASSING_STATUSES = (502, 504)


def is_passing(error: EverstreamError) -> bool:
    """Returns whether a retry of the same request may succeed."""
    return isinstance(error, (*PASSING, StoreFailed)) or error.status in PASSING_STATUSES


class Inbox:
    """The unread ``events`` of a request; ``wake`` is called after each change.

    The request is *lost* from the end of its connection or its server until the first
    answer to the message of `again`. Then its events continue after the last one, and
    the reader does not see the interruption.
    """

    def __init__(self, request: Request, wake: Callable[[], None]) -> None:
        self.request = request
        self.wake = wake
        self.events: deque[Event] = deque()
        self.error: EverstreamError | None = None
        self.is_ended = False
        self.is_lost = False
        self.is_being_recovered = False
        self.attempts: Attempts | None = None
        self.end_message: EndMessage | None = None
        self._has_begun = False
        self._cursor: Cursor | None = None
        self._resumed: Resumed | None = None
        self._recovered: Resumed | None = None

    @property
    def is_alive(self) -> bool:
        """Whether more events may arrive."""
        return self.error is None and not self.is_ended

    @property
    def can_be_recovered(self) -> bool:
        """Whether the message of `again` would recover the request."""
        if self.request.is_kept and self._cursor is not None:
            return True
        return self.request.is_repeatable and not self._has_begun

    def again(self) -> bytes:
        """Returns the message that recovers the request on another connection."""
        if self._cursor is None:
            return self.request.message
        return self.request.resumed_at(self._cursor)

    def fail(self, error: EverstreamError) -> None:
        """Ends the request with ``error``, after the events that have arrived."""
        if self.is_alive:
            self.error = error
            self.wake()

    def give_up(self, error: EverstreamError) -> None:
        """Ends a request that cannot be recovered after ``error``."""
        self.fail(self.request.lost(error, self._has_begun))

    def lose(self, error: EverstreamError, for_good: bool) -> bool:
        """Notes the end of the connection. Returns whether to recover the request.

        If not, the request has ended. ``for_good`` rules out another connection.
        """
        if not self.is_alive:
            return False
        if self.end_message is not None and self.end_message.kind == "detach":
            self._put(Detached(self.request.request_id))
            return False
        if for_good or not (self.can_be_recovered or self.is_being_recovered):
            self.give_up(error)
            return False
        self.is_lost = True
        return True

    def migrates(self, event: Event) -> bool:
        """Returns whether ``event`` moves the session and the request can follow it."""
        return isinstance(event, Migrate) and self.can_be_recovered

    def is_turned_away(self, event: Event) -> bool:
        """Returns whether a stopping server has refused the request, so that a retry is safe.

        A draining server has not executed the request, so even a request without an
        idempotency key can be sent again.
        """
        if not isinstance(event, Refused) or event.error.code not in LEAVING:
            return False
        return self.can_be_recovered or (event.error.code == DRAINING and not self._has_begun)

    def deliver(self, event: Event) -> bool:
        """Adds an event. Returns whether the caller must detach the request on the server."""
        if self.is_lost:
            self.is_lost = False
            if isinstance(event, Resumed) and self._cursor is not None:
                self._recovered = event
                self.wake()
                self._end_if_over(event.seq)
                return self.is_ended and event.busy
        if not isinstance(event, Resumed | Refused):
            self.attempts = None
        if self._recovered is not None and self._is_repeated(event):
            return False
        continues = self._continues_after(event)
        attached = not continues and self._runs_on(event)
        self._advance(event)
        self.is_ended = not continues
        self._put(event)
        if continues and isinstance(event, Token):
            self._end_if_over(event.seq)
        return attached

    def _put(self, event: Event) -> None:
        self._has_begun = True
        self.is_ended = self.is_ended or isinstance(event, Detached)
        self.events.append(event)
        self.wake()

    def _advance(self, event: Event) -> None:
        if isinstance(event, Started | Resumed):
            self._cursor = Cursor(event.session, event.epoch, event.seq)
        elif isinstance(event, Token | Finished) and self._cursor is not None:
            self._cursor = self._cursor._replace(seq=event.seq)

    def _is_repeated(self, event: Event) -> bool:
        """Returns whether to skip ``event``: it is a repeat, or it fails the request by a gap."""
        if not isinstance(event, Token | Finished) or self._cursor is None:
            return False
        if event.seq > self._cursor.seq + 1:
            self.fail(ProtocolError(f"event {event.seq} came after {self._cursor.seq}"))
            return True
        return isinstance(event, Token) and event.seq <= self._cursor.seq

    def _end_if_over(self, seq: int) -> None:
        """Fails if the log ends with event ``seq``, the session is idle and no end has arrived."""
        found = self._recovered
        if found is None or found.busy or seq < found.last_seq or self.is_ended:
            return
        self.fail(ConnectionLost("the session stopped while the connection was lost"))

    def _continues_after(self, event: Event) -> bool:
        """Returns whether more events follow ``event``.

        A resumed request ends with the log or with the running generation. If it is not
        a `resume` of the caller, it ends with the first `Finished`.
        """
        if isinstance(event, Resumed):
            self._resumed = event
            return event.busy or event.seq < event.last_seq
        if self._resumed is None or not isinstance(event, Token | Finished):
            return isinstance(event, Started | Token)
        is_past = event.seq <= self._resumed.last_seq
        if isinstance(event, Finished) and not (is_past and self.request.follows):
            return False
        return self._resumed.busy or event.seq < self._resumed.last_seq

    def _runs_on(self, event: Event) -> bool:
        """Returns whether a generation is still attached after ``event``, the last one."""
        if isinstance(event, Reset):
            return event.busy
        found = self._recovered or self._resumed
        if found is None or not isinstance(event, Finished):
            return False
        return found.busy and event.seq <= found.last_seq
