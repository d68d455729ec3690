"""What has arrived for each request of a socket and is not read yet: no I/O, for both clients."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from clients.python.errors import EverstreamError, ReaderTooSlow
from clients.python.events import Event, Refused, Started, Token

#: Events that may wait for one reader. Beyond that its request fails, and no other one waits.
MAX_UNREAD = 65_536


@dataclass(slots=True)
class _Inbox:
    wake: Callable[[], None]
    events: deque[Event] = field(default_factory=deque)
    error: EverstreamError | None = None

    def fail(self, error: EverstreamError) -> None:
        if self.error is None:
            self.error = error
            self.wake()


class Inboxes:
    """The requests that are alive on a socket, each with its unread events.

    ``abandoned`` are the requests that nobody reads any more: whoever owns the
    socket takes them from there and tells the server to cancel them.
    """

    def __init__(self, max_unread: int = MAX_UNREAD) -> None:
        self.abandoned: deque[str] = deque()
        self._max_unread = max_unread
        self._inboxes: dict[str, _Inbox] = {}

    def open(self, request_id: str, wake: Callable[[], None] = lambda: None) -> None:
        """Begins to keep events of a request; ``wake`` is called when `take` has news."""
        self._inboxes[request_id] = _Inbox(wake)

    def is_open(self, request_id: str) -> bool:
        """Whether `take` may still give something."""
        return request_id in self._inboxes

    def deliver(self, event: Event) -> None:
        """Puts an event where it belongs; one that nobody waits for is dropped."""
        if event.request_id is None:
            assert isinstance(event, Refused), event
            self._fail_unnamed(event.error)
            return
        inbox = self._inboxes.get(event.request_id)
        if inbox is None or inbox.error is not None:
            return
        if len(inbox.events) >= self._max_unread and _goes_on(event):
            inbox.fail(ReaderTooSlow(f"more than {self._max_unread} events were left unread"))
            self.abandoned.append(event.request_id)
            return
        inbox.events.append(event)
        inbox.wake()

    def take(self, request_id: str) -> Event | None:
        """The next event of an open request, or None where it has not come yet.

        Its last event closes it. Raises what ended it otherwise, once all that
        came before has been taken.
        """
        inbox = self._inboxes[request_id]
        if inbox.events:
            event = inbox.events.popleft()
            if not _goes_on(event):
                del self._inboxes[request_id]
            return event
        if inbox.error is None:
            return None
        del self._inboxes[request_id]
        # Several requests may end with one error, and raising it adds a traceback to it.
        raise copy.copy(inbox.error)

    def abandon(self, request_id: str) -> None:
        """Closes a request that nobody reads any more. Finalizers call it, from any thread."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is not None and inbox.error is None:
            self.abandoned.append(request_id)

    def fail(self, error: EverstreamError) -> None:
        """The socket is gone: every open request ends with ``error``."""
        self.abandoned.clear()
        for inbox in list(self._inboxes.values()):
            inbox.fail(error)

    def _fail_unnamed(self, error: EverstreamError) -> None:
        """The server could not read a frame, so nobody knows whose it was: none may hang."""
        for request_id, inbox in list(self._inboxes.items()):
            inbox.fail(error)
            self.abandoned.append(request_id)


def _goes_on(event: Event) -> bool:
    """Whether more events of the same request follow."""
    return isinstance(event, Started | Token)
