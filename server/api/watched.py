"""An answer that follows the client: when it leaves, what it asked for is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.auth.keyring import Caller
from server.api.errors import InvalidApiKey
from server.api.streaming import COMMENT, DirectWriter, writer_of
from server.engine.types import Event, Failed, Finished, Migrated, TokenEvent
from server.models.service import Service
from server.runtime.event_queue import MAX_IN_FLIGHT, EventQueue

#: The last event of a request is one of these.
ENDS = Finished | Failed | Migrated

# How long a reader that was too slow has to read the error that says so.
GRACE_S = 1.0


class WatchedAnswer(Response):
    """Answers with the events of an event queue; when the client leaves, it is released."""

    #: What shows in silence that the stream is alive.
    comment = COMMENT

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._async_engine, self._sessions = service.async_engine, service.sessions
        self._keys, self._heartbeat_s = service.keys, service.heartbeat_s
        self._event_queue: EventQueue[Event] = EventQueue(
            service.max_queued_events, self._on_backpressure, MAX_IN_FLIGHT
        )
        self._feeding: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs `_answer` until it is done or the client has left.

        Once the event queue is broken it gets `GRACE_S`: it may hang in a send to a client that
        does not read. Raises the `RequestError` that `_answer` has raised.
        """
        working = asyncio.ensure_future(self._answer(scope, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        broken = self._event_queue.broken
        try:
            caller: Caller | None = scope.get("state", {}).get("caller")
            with nullcontext() if caller is None else caller.watched(self._end_with_key):
                ends: set[asyncio.Future[Any]] = {working, leaving}
                await asyncio.wait(ends | {broken}, return_when=asyncio.FIRST_COMPLETED)
                if not working.done() and not leaving.done():
                    first = asyncio.FIRST_COMPLETED
                    await asyncio.wait(ends, timeout=GRACE_S, return_when=first)
        finally:
            try:
                await _cancelled(working, leaving)
                if self._feeding is not None:
                    await _cancelled(self._feeding)
            finally:  # also where this is cancelled once more
                self._async_engine.requests.release(self._event_queue)
                del self._event_queue  # which has a method of this: a prompt must not wait for gc
        if not working.cancelled():
            working.result()

    def _end_with_key(self) -> None:
        self._event_queue.fail(InvalidApiKey())

    def _direct_writer(
        self, scope: Scope, encode: Callable[[Sequence[TokenEvent]], list[bytes]]
    ) -> DirectWriter[Event]:
        """Of this answer, with comments in silence while it is entered."""
        return DirectWriter(
            self._event_queue, writer_of(scope), encode, self._heartbeat_s, self.comment
        )

    async def _answer(self, scope: Scope, send: Send) -> None:
        """Writes the answer. Where it raises a `RequestError`, it has sent nothing."""
        raise NotImplementedError

    def _on_backpressure(self, is_full: bool) -> None:
        """Parks the requests of a client that does not keep up, until it has."""
        requests = self._async_engine.requests
        (requests.hold if is_full else requests.unhold)(self._event_queue)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
