"""The answer to a completion: it follows the client, and ends the work when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.completion import DONE, sse
from server.api.errors import error_object
from server.api.refuse import error_response
from server.api.shortcut import Write, writer_of
from server.driver import Driver
from server.engine.errors import EngineError, InternalFailure
from server.engine.types import Event, Finished, Request
from server.outbox import Outbox

# How long a reader that was too slow has to read the error that says so.
GRACE_S = 1.0

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class WatchedAnswer(Response):
    """Submits ``request`` and answers with its events; cancels it if the client disconnects."""

    def __init__(self, driver: Driver, request: Request, outbox_events: int) -> None:
        super().__init__()
        self._driver = driver
        self._request = request
        self._outbox: Outbox[Event] = Outbox(outbox_events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._work(scope, receive, send)
        try:
            await _while_connected(work, receive, self._outbox.broken)
        finally:
            self._driver.release(self._outbox)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class JsonAnswer(WatchedAnswer):
    """The whole answer in one body. ``write`` makes it of all events, or raises `EngineError`."""

    def __init__(
        self,
        driver: Driver,
        request: Request,
        write: Callable[[list[Event]], bytes],
        outbox_events: int,
    ) -> None:
        super().__init__(driver, request, outbox_events)
        self._write = write

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._driver.submit(self._request, self._outbox)
            body = self._write(await _collect(self._outbox))
        except EngineError as error:
            response = error_response(error)
        else:
            response = Response(body, media_type="application/json")
        await response(scope, receive, send)


class SseAnswer(WatchedAnswer):
    """Chunks as they come; ``write`` makes those of one event.

    Until the first event a failure is a plain HTTP error.
    """

    def __init__(
        self, driver: Driver, request: Request, write: Callable[[Event], bytes], outbox_events: int
    ) -> None:
        super().__init__(driver, request, outbox_events)
        self._write = write

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._driver.submit(self._request, self._outbox)
            events = await self._outbox.take()
            _raise_if_failed(events)
        except EngineError as error:
            await error_response(error)(scope, receive, send)
            return
        headers = [(name.encode(), value.encode()) for name, value in SSE_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._stream(events, send, writer_of(scope))
        await send({"type": "http.response.body", "body": b""})

    async def _stream(self, events: list[Event], send: Send, write: Write) -> None:
        """Sends ``events`` and all that follow; those take the shortcut while the client reads."""

        def write_now(events: Sequence[Event]) -> bool:
            ended = isinstance(events[-1], Finished)
            return not ended and write([self._write(event) for event in events])

        while True:
            body = b"".join(map(self._write, events))
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if isinstance(events[-1], Finished):
                return
            try:
                events = await self._outbox.take(write_now)
            except EngineError as error:
                body = sse({"error": error_object(error)}) + DONE
                await send({"type": "http.response.body", "body": body, "more_body": True})
                return


async def _collect(outbox: Outbox[Event]) -> list[Event]:
    """All events of a request; wakes up for the last one."""
    collected: list[Event] = []

    def collect(events: Sequence[Event]) -> bool:
        if isinstance(events[-1], Finished):
            return False
        collected.extend(events)
        return True

    while not collected or not isinstance(collected[-1], Finished):
        collected.extend(await outbox.take(collect))
    return collected


def _raise_if_failed(events: list[Event]) -> None:
    """Raises `InternalFailure` where a request failed before its first token."""
    for event in events:
        if not isinstance(event, Finished):
            continue
        if event.finish_reason == "error" and event.usage.completion_tokens == 0:
            raise InternalFailure(event.error or "the request failed")


async def _while_connected(
    work: Coroutine[Any, Any, None], receive: Receive, broken: asyncio.Future[EngineError]
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
