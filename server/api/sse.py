"""The answer to a completion: it follows the client, and ends the work when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.completion import DONE, CompletionWriter, ended, sse
from server.api.errors import error_object
from server.api.refuse import error_response
from server.api.service import Service
from server.api.shortcut import Write, writer_of
from server.engine.errors import EngineError
from server.engine.types import Event, Failed, Finished, Migrated, Request, Started, TokenEvent
from server.outbox import ON_THEIR_WAY, Outbox
from server.sessions import NO_MORE, KeyInUse, Resumed
from server.store.base import Keyed
from server.store.errors import HistoryGone

# How long a reader that was too slow has to read the error that says so.
GRACE_S = 1.0

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class WatchedAnswer(Response):
    """Answers with the events of an outbox; when the client leaves, it is released."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._driver, self._sessions = service.driver, service.sessions
        self._outbox: Outbox[Event] = Outbox(service.outbox_events, self._press, ON_THEIR_WAY)
        self._feeding: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._work(scope, receive, send)
        try:
            await _while_connected(work, receive, self._outbox.broken)
        finally:
            self._driver.release(self._outbox)
            if self._feeding is not None:
                self._feeding.cancel()
                await asyncio.gather(self._feeding, return_exceptions=True)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    def _press(self, full: bool) -> None:
        """A client that does not keep up costs nothing: what it asked for parks."""
        (self._driver.hold if full else self._driver.go_on)(self._outbox)


class RequestAnswer(WatchedAnswer):
    """Submits ``request``; its work ends, or is detached, when the client leaves."""

    def __init__(self, service: Service, request: Request) -> None:
        super().__init__(service)
        self._request = request
        self._unended = set(request.ids)

    async def _submit(self) -> None:
        """Starts the work, or what repeats it where it has been done under the same key."""
        if self._request.key is None:
            await self._sessions.submit(self._request, self._outbox)
        elif (found := await self._sessions.submit_once(self._request, self._outbox)) is not None:
            await self._repeat(found)

    async def _repeat(self, found: Keyed) -> None:
        request, outbox = self._request, self._outbox
        if found.is_append:
            if found.finished is None:
                raise KeyInUse
            outbox.put([replace(found.finished, request_id=request.request_id)])
            return
        resumed = await self._sessions.again(request.owner, found, request.request_id, outbox)
        epoch = resumed.info.epoch
        outbox.put(
            [Started(request.request_id, found.session, found.length, epoch, found.first_seq)]
        )
        self._feeding = asyncio.create_task(self._feed(resumed))

    async def _feed(self, resumed: Resumed) -> None:
        """What was missed, up to the request's end, or all and then what comes."""
        request, outbox = self._request, self._outbox
        try:
            async for events in self._sessions.missed(request.owner, resumed, request.request_id):
                await outbox.emptied()
                ends = [i for i, event in enumerate(events) if isinstance(event, Finished)]
                outbox.put(events[: ends[0] + 1] if ends else events)
                if ends:
                    return
            if not resumed.info.busy:
                raise HistoryGone(NO_MORE)
            self._driver.caught_up(request.request_id)
        except EngineError as error:
            outbox.fail(error)

    def _is_end(self, events: Sequence[Event]) -> bool:
        """Whether all choices have ended with ``events``."""
        for event in events:
            if not isinstance(event, Started | TokenEvent):
                self._unended.discard(event.request_id)
        return not self._unended


class JsonAnswer(RequestAnswer):
    """The whole answer in one body. ``write`` makes it of all events, or raises `EngineError`."""

    def __init__(
        self, service: Service, request: Request, write: Callable[[list[Event]], bytes]
    ) -> None:
        super().__init__(service, request)
        self._write = write

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._submit()
            body = self._write(await self._collect())
        except EngineError as error:
            response = error_response(error)
        else:
            response = Response(body, media_type="application/json")
        await response(scope, receive, send)

    async def _collect(self) -> list[Event]:
        """All events of the request; wakes up for those that are an end."""
        collected: list[Event] = []

        def collect(events: Sequence[Event]) -> bool:
            if not isinstance(events[-1], Started | TokenEvent):
                return False
            self._is_end(events)
            collected.extend(events)
            return True

        while True:
            events = await self._outbox.take(collect)
            collected.extend(events)
            if self._is_end(events):
                return collected


class SseAnswer(RequestAnswer):
    """Chunks as they come, by ``writer``.

    Until the first event a failure is a plain HTTP error.
    """

    def __init__(self, service: Service, request: Request, writer: CompletionWriter) -> None:
        super().__init__(service, request)
        self._writer = writer

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._submit()
            events = await self._outbox.take()
            _raise_if_failed(events)
        except EngineError as error:
            await error_response(error)(scope, receive, send)
            return
        await start_stream(send)
        await self._stream(events, send, writer_of(scope))
        await send({"type": "http.response.body", "body": b""})

    async def _stream(self, events: list[Event], send: Send, write: Write) -> None:
        """Sends ``events`` and all that follow; those take the shortcut while the client reads."""
        chunks = self._writer.chunks

        def write_now(events: Sequence[Event]) -> bool:
            if not isinstance(events[-1], TokenEvent):
                return False
            if write([chunks(event) for event in events]):
                self._is_end(events)
                return True
            return False

        while True:
            body = b"".join(map(chunks, events))
            is_end = self._is_end(events)
            if is_end:
                body += self._writer.end()
            if body:
                await send_part(send, body)
            if is_end:
                return
            try:
                events = await self._outbox.take(write_now)
            except EngineError as error:
                await send_part(send, sse({"error": error_object(error)}) + DONE)
                return


async def start_stream(send: Send) -> None:
    """The head of a stream of server-sent events."""
    headers = [(name.encode(), value.encode()) for name, value in SSE_HEADERS.items()]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_part(send: Send, body: bytes) -> None:
    """A piece of a body that goes on."""
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _raise_if_failed(events: list[Event]) -> None:
    """Raises where a request failed before its first token."""
    for event in events:
        if isinstance(event, Failed | Migrated):
            ended([event])
        if (
            isinstance(event, Finished)
            and event.finish_reason == "error"
            and event.usage.completion_tokens == 0
        ):
            ended([event])


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
