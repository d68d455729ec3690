"""An answer that follows the client: when it leaves, what it asked for is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.auth.keyring import Caller
from server.api.errors import InvalidApiKey
from server.engine.types import Event
from server.errors import RequestError
from server.models.service import Service
from server.runtime.event_queue import MAX_IN_FLIGHT, EventQueue

# How long a reader that was too slow has to read the error that says so.
GRACE_S = 1.0


class WatchedAnswer(Response):
    """Answers with the events of an event queue; when the client leaves, it is released."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._async_engine, self._sessions = service.async_engine, service.sessions
        self._keys = service.keys
        self._event_queue: EventQueue[Event] = EventQueue(
            service.max_queued_events, self._on_backpressure, MAX_IN_FLIGHT
        )
        self._feeding: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._work(scope, receive, send)
        try:
            with self._ended_with_its_key(scope):
                await _while_connected(work, receive, self._event_queue.broken)
        finally:
            if self._feeding is not None:
                self._feeding.cancel()
                await asyncio.gather(self._feeding, return_exceptions=True)
            self._async_engine.release(self._event_queue)

    def _ended_with_its_key(self, scope: Scope) -> AbstractContextManager[None]:
        caller: Caller | None = scope.get("state", {}).get("caller")
        if caller is None:
            return nullcontext()
        return caller.watched(lambda: self._event_queue.fail(InvalidApiKey()))

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    def _on_backpressure(self, is_full: bool) -> None:
        """Parks the requests of a client that does not keep up, until it has."""
        (self._async_engine.hold if is_full else self._async_engine.go_on)(self._event_queue)


async def _while_connected(
    work: Coroutine[Any, Any, None], receive: Receive, broken: asyncio.Future[RequestError]
) -> None:
    """Runs ``work`` until it is done or the client has left.

    After ``broken`` it gets `GRACE_S`: it may hang in a send to a client that does not read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        watched: set[asyncio.Future[Any]] = {working, leaving, broken}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if broken.done() and not working.done() and not leaving.done():
            await asyncio.wait({working, leaving}, timeout=GRACE_S)
    finally:
        pending = [task for task in (working, leaving) if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    if working.done() and not working.cancelled():
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
