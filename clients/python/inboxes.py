"""The open requests of a client, each with its unread events. Without I/O."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from .errors import STOPPING, ConnectionLost, EverstreamError, ReaderTooSlow, SessionMigrated
from .events import Event, Refused
from .inbox import Inbox, is_passing
from .request import EndMessage, Request

#: The bound on unread events of one request. Beyond it the request fails; others are unaffected.
MAX_UNREAD = 65_536


class Lost(NamedTuple):
    """A request to recover, and the error that interrupted it."""

    inbox: Inbox
    error: EverstreamError


class Inboxes:
    """The inboxes by request id.

    The owner of the socket sends ``end_messages`` and recovers the requests in ``lost``.
    """

    def __init__(self, max_unread: int = MAX_UNREAD) -> None:
        self.end_messages: deque[EndMessage] = deque()
        self.lost: deque[Lost] = deque()
        self._max_unread = max_unread
        self._inboxes: dict[str, Inbox] = {}

    def open(self, request: Request, wake: Callable[[], None] = lambda: None) -> None:
        """Adds a request; ``wake`` is called when `take` has something to return or raise."""
        self._inboxes[request.request_id] = Inbox(request, wake)

    def is_open(self, request_id: str) -> bool:
        """Returns whether `take` may still return something."""
        return request_id in self._inboxes

    def is_being_recovered(self, request_id: str) -> bool:
        """Returns whether a request is lost and its recovery has not been sent yet."""
        inbox = self._inboxes.get(request_id)
        return inbox is not None and inbox.is_being_recovered and inbox.is_alive

    def is_wanted(self, inbox: Inbox) -> bool:
        """Returns whether a lost request still has a reader."""
        is_open = self._inboxes.get(inbox.request.request_id) is inbox
        return is_open and inbox.is_alive and inbox.is_lost

    def deliver(self, event: Event) -> None:
        """Adds an event to its inbox. An event without an open request is dropped."""
        if event.request_id is None:
            assert isinstance(event, Refused), event
            self._fail_unnamed(event.error)
            return
        inbox = self._inboxes.get(event.request_id)
        if inbox is None or not inbox.is_alive:
            return
        if inbox.migrates(event):
            inbox.is_lost = True
            self.lost.append(Lost(inbox, SessionMigrated(STOPPING, "migrated")))
        elif isinstance(event, Refused) and (
            inbox.is_turned_away(event) or (inbox.is_lost and is_passing(event.error))
        ):
            inbox.is_lost = True
            self.lost.append(Lost(inbox, event.error))
        elif inbox.deliver(event):
            self.end_messages.append(EndMessage("detach", event.request_id))
        elif len(inbox.events) > self._max_unread and inbox.is_alive:
            inbox.events.pop()
            inbox.fail(ReaderTooSlow(f"more than {self._max_unread} events were left unread"))
            self.end_messages.append(EndMessage("detach", event.request_id))

    def take(self, request_id: str) -> list[Event]:
        """Returns the unread events of an open request, possibly none.

        The last event closes the request. If it ended with an error instead, this
        raises the error after all events have been taken.
        """
        inbox = self._inboxes[request_id]
        if inbox.events:
            events = list(inbox.events)
            inbox.events.clear()
            if inbox.is_ended:
                del self._inboxes[request_id]
            return events
        if inbox.error is None:
            return []
        del self._inboxes[request_id]
        # Several requests may end with one error, and raising it adds a traceback to it.
        raise copy.copy(inbox.error)

    def request_end(self, end_message: EndMessage) -> None:
        """Ends a request whose reader waits for the last events."""
        inbox = self._inboxes.get(end_message.request_id)
        if inbox is None or not inbox.is_alive:
            return
        inbox.end_message = end_message
        if inbox.is_lost:  # a cancel is sent after the recovery
            if end_message.kind == "detach":
                inbox.lose(ConnectionLost("detached"), for_good=False)
        else:
            self.end_messages.append(end_message)

    def abandon(self, request_id: str, kind: Literal["cancel", "detach"] = "cancel") -> None:
        """Closes a request that has no reader any more."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is not None and inbox.is_alive and not inbox.is_being_recovered:
            self.end_messages.append(EndMessage(kind, request_id))

    def lose(self, error: EverstreamError, for_good: bool) -> None:
        """Notes the end of the connection. Requests that cannot be recovered end."""
        self.end_messages.clear()
        for inbox in list(self._inboxes.values()):
            if inbox.lose(error, for_good):
                self.lost.append(Lost(inbox, error))

    def fail(self, error: EverstreamError) -> None:
        """Ends every open request with ``error``, because the client was closed."""
        self.end_messages.clear()
        self.lost.clear()
        for inbox in list(self._inboxes.values()):
            inbox.fail(error)

    def _fail_unnamed(self, error: EverstreamError) -> None:
        """Fails all requests: the server could not parse a frame, so its request is unknown."""
        for request_id, inbox in list(self._inboxes.items()):
            if inbox.is_alive:
                inbox.fail(error)
                self.end_messages.append(EndMessage("cancel", request_id))
