"""What has arrived for each request of a socket and is not read yet: no I/O, for both clients."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from clients.python.errors import EverstreamError, ReaderTooSlow
from clients.python.events import Event, Finished, Refused, Reset, Resumed, Started, Token

#: Events that may wait for one reader. Beyond that its request fails, and no other one waits.
MAX_UNREAD = 65_536


class Farewell(NamedTuple):
    """A message about a request that nobody reads any more."""

    kind: Literal["cancel", "detach"]
    request_id: str


@dataclass(slots=True)
class _Inbox:
    """``follows``: events of more than one generation may come, and all are wanted."""

    wake: Callable[[], None]
    follows: bool
    events: deque[Event] = field(default_factory=deque)
    error: EverstreamError | None = None
    resumed: Resumed | None = None
    ended: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether the server may have more for it."""
        return self.error is None and not self.ended

    def fail(self, error: EverstreamError) -> None:
        if self.is_alive:
            self.error = error
            self.wake()

    def goes_on(self, event: Event) -> bool:
        """Whether more events follow ``event``.

        What is read again ends where the log ends, or with the running generation;
        where only one generation is wanted, with the first end of one.
        """
        if isinstance(event, Resumed):
            self.resumed = event
            return event.busy or event.seq < event.last_seq
        if self.resumed is None or not isinstance(event, Token | Finished):
            return isinstance(event, Started | Token)
        is_past = event.seq <= self.resumed.last_seq
        if isinstance(event, Finished) and not (is_past and self.follows):
            return False
        return self.resumed.busy or event.seq < self.resumed.last_seq

    def runs_on(self, event: Event) -> bool:
        """Whether ``event``, the last one that is wanted, leaves a generation attached to it."""
        if isinstance(event, Reset):
            return event.busy
        if self.resumed is None or not isinstance(event, Finished):
            return False
        return self.resumed.busy and event.seq <= self.resumed.last_seq


class Inboxes:
    """The requests that are alive on a socket, each with its unread events.

    ``farewells`` are due to the server: whoever owns the socket takes them from
    there and sends them.
    """

    def __init__(self, max_unread: int = MAX_UNREAD) -> None:
        self.farewells: deque[Farewell] = deque()
        self._max_unread = max_unread
        self._inboxes: dict[str, _Inbox] = {}

    def open(
        self, request_id: str, wake: Callable[[], None] = lambda: None, follows: bool = False
    ) -> None:
        """Begins to keep events of a request; ``wake`` is called when `take` has news.

        One that ``follows`` a session wants the events of several generations.
        """
        self._inboxes[request_id] = _Inbox(wake, follows)

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
        if inbox is None or not inbox.is_alive:
            return
        goes_on = inbox.goes_on(event)
        if len(inbox.events) >= self._max_unread and goes_on:
            inbox.fail(ReaderTooSlow(f"more than {self._max_unread} events were left unread"))
            self.farewells.append(Farewell("detach", event.request_id))
            return
        inbox.ended = not goes_on
        if inbox.ended and inbox.runs_on(event):
            self.farewells.append(Farewell("detach", event.request_id))
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
            if inbox.ended and not inbox.events:
                del self._inboxes[request_id]
            return event
        if inbox.error is None:
            return None
        del self._inboxes[request_id]
        # Several requests may end with one error, and raising it adds a traceback to it.
        raise copy.copy(inbox.error)

    def abandon(self, request_id: str, kind: Literal["cancel", "detach"] = "cancel") -> None:
        """Closes a request that nobody reads any more. Finalizers call it, from any thread."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is not None and inbox.is_alive:
            self.farewells.append(Farewell(kind, request_id))

    def fail(self, error: EverstreamError) -> None:
        """The socket is gone: every open request ends with ``error``."""
        self.farewells.clear()
        for inbox in list(self._inboxes.values()):
            inbox.fail(error)

    def _fail_unnamed(self, error: EverstreamError) -> None:
        """The server could not read a frame, so nobody knows whose it was: none may hang."""
        for request_id, inbox in list(self._inboxes.items()):
            if inbox.is_alive:
                inbox.fail(error)
                self.farewells.append(Farewell("cancel", request_id))
