"""Answers made of the events of requests: one body of JSON, or server-sent events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

from starlette.types import Receive, Scope, Send

from server.api.completion import DONE, JsonWriter, ended, sse
from server.api.direct_write import Write, writer_of
from server.api.errors import error_object
from server.api.large_responses import send_piece, send_whole
from server.api.middleware.refuse import error_response
from server.api.watched import WatchedAnswer, send_part, start_stream
from server.engine.types import Event, Failed, Finished, Migrated, Request, Started, TokenEvent
from server.errors import RequestError
from server.models.service import Service
from server.sessions.idempotency import NO_MORE, KeyInUse
from server.sessions.resume import Resumed
from server.store.base import Keyed
from server.store.errors import HistoryGone

#: The last event of a request is one of these.
ENDS = Finished | Failed | Migrated

#: Requests of one answer that are in the engine at once; the others follow as these end.
AT_ONCE = 32

#: What ends as soon as one of the answer's own requests does.
PASSING = frozenset({"queue_full", "rate_limited", "capacity_exhausted"})


class Writer(Protocol):
    """Writes the server-sent events for events of the engine, and what comes after the last.

    ``parts`` are those for an event that may make large ones, None for any other.
    """

    def chunks(self, event: Event, /) -> bytes: ...
    def parts(self, event: Event, /) -> Iterator[bytes] | None: ...
    def end(self) -> bytes: ...


class RequestAnswer(WatchedAnswer):
    """Submits ``requests``; their work ends, or is detached, when the client leaves.

    One that has a key stands alone.
    """

    def __init__(self, service: Service, requests: Request | Sequence[Request]) -> None:
        super().__init__(service)
        self._requests = (requests,) if isinstance(requests, Request) else tuple(requests)
        self._request = self._requests[0]
        self._unended = {id for request in self._requests for id in request.ids}
        self._live: Counter[str] = Counter()
        self._room = asyncio.Semaphore(AT_ONCE)

    async def _submit(self) -> None:
        """Starts the work, or what repeats it where it has been done under the same key."""
        first, *others = self._requests
        if first.key is None:
            await self._submit_one(first)
        elif (found := await self._keys.submit_once(first, self._event_queue)) is not None:
            await self._repeat(found)
        if others:
            self._feeding = asyncio.create_task(self._submit_others(others))

    async def _submit_one(self, request: Request) -> None:
        await self._room.acquire()
        self._live[request.request_id] = len(request.ids)
        try:
            await self._sessions.submit(request, self._event_queue)
        except RequestError:
            del self._live[request.request_id]
            raise

    async def _submit_others(self, requests: Sequence[Request]) -> None:
        """As there is room. Where the server or the tenant has none, one at a time fewer."""
        for request in requests:
            while True:
                try:
                    await self._submit_one(request)
                    break
                except RequestError as error:
                    if error.code not in PASSING or not self._live:
                        self._event_queue.fail(error)
                        return

    async def _repeat(self, found: Keyed) -> None:
        request, event_queue = self._request, self._event_queue
        if found.is_append:
            if found.finished is None:
                raise KeyInUse
            event_queue.put([replace(found.finished, request_id=request.request_id)])
            return
        resumed = await self._keys.resume(request.owner, found, request.request_id, event_queue)
        epoch = resumed.info.epoch
        event_queue.put(
            [Started(request.request_id, found.session, found.length, epoch, found.first_seq)]
        )
        self._feeding = asyncio.create_task(self._feed(resumed))

    async def _feed(self, resumed: Resumed) -> None:
        """What was missed, up to the request's end, or all and then what comes."""
        request, event_queue = self._request, self._event_queue
        try:
            async for events in self._sessions.missed(request.owner, resumed, request.request_id):
                await event_queue.emptied()
                ends = [i for i, event in enumerate(events) if isinstance(event, Finished)]
                event_queue.put(events[: ends[0] + 1] if ends else events)
                if ends:
                    return
            if not resumed.info.busy:
                raise HistoryGone(NO_MORE)
            self._async_engine.caught_up(request.request_id)
        except RequestError as error:
            event_queue.fail(error)

    def _is_end(self, events: Sequence[Event]) -> bool:
        """Whether all choices of all requests have ended with ``events``."""
        for event in events:
            if isinstance(event, ENDS):
                self._unended.discard(event.request_id)
                if len(self._requests) > 1:
                    self._make_room(event.request_id.partition("/")[0])
        return not self._unended

    def _make_room(self, request_id: str) -> None:
        """One choice of a request has ended; with the last of them another can begin."""
        self._live[request_id] -= 1
        if self._live[request_id] <= 0:
            del self._live[request_id]
            self._room.release()


class JsonAnswer(RequestAnswer):
    """The whole answer in one body, by ``writer``; it may have ``num_bytes``."""

    def __init__(
        self,
        service: Service,
        requests: Request | Sequence[Request],
        writer: JsonWriter,
        num_bytes: int = 0,
    ) -> None:
        super().__init__(service, requests)
        self._large, self._writer, self._num_bytes = service.large_answers, writer, num_bytes

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            try:
                held.enter_context(self._large.reserve(self._request.owner, self._num_bytes))
                await self._submit()
                await self._collect()
                whole = self._large.parts(self._writer.whole(), self._num_bytes)
                parts = [part async for part in whole]
            except RequestError as error:
                await error_response(error)(scope, receive, send)
                return
            await send_whole(send, parts)

    async def _collect(self) -> None:
        """Gives all events to the writer; wakes up for those that are an end."""

        def collect(events: Sequence[Event]) -> bool:
            if isinstance(events[-1], ENDS):
                return False
            self._add(events)
            return True

        while not self._add(await self._event_queue.take(collect)):
            pass

    def _add(self, events: Sequence[Event]) -> bool:
        for event in events:
            self._writer.add(event)
        return self._is_end(events)


class SseAnswer(RequestAnswer):
    """Chunks as they come, by ``writer``; those of one event may have ``num_bytes``.

    Until the first event a failure is a plain HTTP error.
    """

    def __init__(
        self,
        service: Service,
        requests: Request | Sequence[Request],
        writer: Writer,
        num_bytes: int = 0,
    ) -> None:
        super().__init__(service, requests)
        self._large, self._writer, self._num_bytes = service.large_answers, writer, num_bytes

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            try:
                held.enter_context(self._large.reserve(self._request.owner, self._num_bytes))
                await self._submit()
                events = await self._event_queue.take()
                _raise_if_failed(events)
            except RequestError as error:
                await error_response(error)(scope, receive, send)
                return
            await start_stream(send)
            await self._stream(events, send, writer_of(scope))
            await send({"type": "http.response.body", "body": b""})

    async def _stream(self, events: list[Event], send: Send, write: Write) -> None:
        """Sends ``events`` and all that follow; written directly while the client reads."""
        chunks = self._writer.chunks
        refused: list[bytes] = []  # a writer counts what it makes: nothing is made twice

        def write_now(events: Sequence[Event]) -> bool:
            if not all(isinstance(event, TokenEvent) for event in events):
                return False
            made = [chunks(event) for event in events]
            if write(made):
                self._is_end(events)
                return True
            refused.extend(made)
            return False

        while True:
            made = [*refused]
            for event in events[len(refused) :]:
                if (parts := self._writer.parts(event)) is None:
                    made.append(chunks(event))
                    continue
                await _send_all(send, made)
                async for part in self._large.parts(parts, self._num_bytes):
                    await send_piece(send, part)
            refused.clear()
            is_end = self._is_end(events)
            if is_end:
                made.append(self._writer.end())
            await _send_all(send, made)
            if is_end:
                return
            try:
                events = await self._event_queue.take(write_now)
            except RequestError as error:
                await send_part(send, sse({"error": error_object(error)}) + DONE)
                return


async def _send_all(send: Send, made: list[bytes]) -> None:
    """Sends ``made`` and empties it."""
    if body := b"".join(made):
        await send_part(send, body)
    made.clear()


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
