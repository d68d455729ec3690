"""What has arrived for one request and is not read yet, over all its connections: no I/O."""

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

#: What passes by itself. The server may not know yet that our last connection has ended: then
#: that one is the other reader, or still holds the key.
PASSING = (CapacityExhausted, ConnectionLost, KeyInUse, SessionAttached, SessionMigrated)
#: The server did nothing and is about to go: another one, or the next one, may do it.
DRAINING = "draining"
LEAVING = (DRAINING, "store_taken")
PASSING_STATUSES = (502, 504)


def is_passing(error: EverstreamError) -> bool:
    """Whether the same request may do better a little later."""
    return isinstance(error, (*PASSING, StoreFailed)) or error.status in PASSING_STATUSES


class Inbox:
    """``events`` are unread; ``wake`` is called when there are more, or when something else is new.

    It is *lost* from the end of its connection, or its server's, until the first
    answer to what `again` says. Then its events continue where they were: the reader
    sees nothing of it.
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
        """Whether the server may have more for it."""
        return self.error is None and not self.is_ended

    @property
    def can_be_recovered(self) -> bool:
        """Whether `again` would bring it back."""
        if self.request.is_kept and self._cursor is not None:
            return True
        return self.request.is_repeatable and not self._has_begun

    def again(self) -> bytes:
        """The message that brings it back on another connection."""
        if self._cursor is None:
            return self.request.message
        return self.request.resumed_at(self._cursor)

    def fail(self, error: EverstreamError) -> None:
        """It ends with ``error``, after what has arrived."""
        if self.is_alive:
            self.error = error
            self.wake()

    def give_up(self, error: EverstreamError) -> None:
        """Nothing brings it back after ``error``."""
        self.fail(self.request.lost(error, self._has_begun))

    def lose(self, error: EverstreamError, for_good: bool) -> bool:
        """Its connection has ended. Whether it is worth bringing back; it has failed where not."""
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
        """Whether ``event`` asks us to read on elsewhere, and we can."""
        return isinstance(event, Migrate) and self.can_be_recovered

    def is_turned_away(self, event: Event) -> bool:
        """Whether ``event`` is the refusal of a server that is leaving: another may be asked.

        One that drains has done nothing: this is safe for a request without a key, too.
        """
        if not isinstance(event, Refused) or event.error.code not in LEAVING:
            return False
        return self.can_be_recovered or (event.error.code == DRAINING and not self._has_begun)

    def deliver(self, event: Event) -> bool:
        """Takes an event. Whether a generation that is not wanted stays attached to the request."""
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
        goes_on = self._goes_on(event)
        attached = not goes_on and self._runs_on(event)
        self._advance(event)
        self.is_ended = not goes_on
        self._put(event)
        if goes_on and isinstance(event, Token):
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
        """Whether ``event`` has been here before. One that leaves a gap is an error."""
        if not isinstance(event, Token | Finished) or self._cursor is None:
            return False
        if event.seq > self._cursor.seq + 1:
            self.fail(ProtocolError(f"event {event.seq} came after {self._cursor.seq}"))
            return True
        return isinstance(event, Token) and event.seq <= self._cursor.seq

    def _end_if_over(self, seq: int) -> None:
        """Fails where the log ends with event ``seq``, nothing runs, and no end has come."""
        found = self._recovered
        if found is None or found.busy or seq < found.last_seq or self.is_ended:
            return
        self.fail(ConnectionLost("the session stopped while the connection was lost"))

    def _goes_on(self, event: Event) -> bool:
        """Whether more events follow ``event``.

        What is read again ends where the log ends, or with the running generation;
        where only one generation is wanted, with the first end of one.
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
        """Whether ``event``, the last one that is wanted, leaves a generation attached to it."""
        if isinstance(event, Reset):
            return event.busy
        found = self._recovered or self._resumed
        if found is None or not isinstance(event, Finished):
            return False
        return found.busy and event.seq <= found.last_seq
