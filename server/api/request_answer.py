"""Answers that submit requests to the engine: one body of JSON, or server-sent events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from starlette.types import Scope, Send

from server.api.completion import DONE, ended, sse
from server.api.errors import error_object
from server.api.streaming import COMMENT_BETWEEN_IDS, DirectWriter, send_stream, send_whole
from server.api.watched import ENDS, WatchedAnswer
from server.engine.types import Event, Finished, Request, Started, TokenEvent
from server.errors import RequestError
from server.models.service import Service
from server.sessions.idempotency import NO_MORE, KeyInUse
from server.sessions.resume import Resumed
from server.store.base import Keyed
from server.store.errors import HistoryGone

#: Requests of one answer that are in the engine at once; the others follow as these end.
AT_ONCE = 32

#: What ends as soon as one of the answer's own requests does.
PASSING = frozenset({"queue_full", "rate_limited", "capacity_exhausted"})

W = TypeVar("W")


class JsonWriter(Protocol):
    """Makes a whole answer of the events of its requests.

    ``whole`` raises the `RequestError` that one of the requests ended by. Each of its parts
    takes a few milliseconds; those that are empty are where others may have their turn.
    """

    def add(self, event: Event, /) -> None: ...
    def whole(self) -> Iterator[bytes]: ...


class SseWriter(Protocol):
    """Writes the server-sent events for events of the engine, and what comes after the last.

    Those of an event that may make large ones come in parts, as in `JsonWriter`.
    """

    def token(self, event: TokenEvent, /) -> bytes: ...
    def chunks(self, event: Event, /) -> bytes | Iterator[bytes]: ...
    def end(self) -> bytes: ...


class RequestAnswer(WatchedAnswer, Generic[W]):
    """Submits ``requests``; their work ends, or is detached, when the client leaves.

    One that has a key stands alone. ``writer`` writes their events, in about ``num_bytes``.
    """

    def __init__(
        self,
        service: Service,
        requests: Request | Sequence[Request],
        writer: W,
        num_bytes: int = 0,
    ) -> None:
        super().__init__(service)
        self._large, self._writer, self._num_bytes = service.large_answers, writer, num_bytes
        self._requests = (requests,) if isinstance(requests, Request) else tuple(requests)
        self._request = self._requests[0]
        if self._request.keep or self._request.session is not None:
            self.comment = COMMENT_BETWEEN_IDS
        self._unended = {id for request in self._requests for id in request.ids}
        self._live = Counter({self._request.request_id: len(self._request.ids)})
        self._room = asyncio.Semaphore(AT_ONCE - 1)

    async def _submit(self) -> None:
        """Starts the work, or what repeats it where it has been done under the same key."""
        first, *others = self._requests
        if first.key is None:
            await self._sessions.submit(first, self._event_queue)
        elif (found := await self._keys.submit_once(first, self._event_queue)) is not None:
            await self._repeat(found)
        if others:
            self._feeding = asyncio.create_task(self._submit_others(others))

    async def _submit_others(self, requests: Sequence[Request]) -> None:
        """As there is room. Where the server or the tenant has none, one at a time fewer."""
        for request in requests:
            while True:
                await self._room.acquire()
                self._live[request.request_id] = len(request.ids)
                try:
                    await self._sessions.submit(request, self._event_queue)
                    break
                except RequestError as error:
                    del self._live[request.request_id]
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
            self._async_engine.requests.caught_up(request.request_id)
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


class JsonAnswer(RequestAnswer[JsonWriter]):
    """The whole answer in one body, by ``writer``; it may have ``num_bytes``."""

    async def _answer(self, scope: Scope, send: Send) -> None:
        with self._large.reserve(self._request.owner, self._num_bytes):
            await self._submit()
            await self._collect()
            whole = self._large.parts(self._writer.whole(), self._num_bytes)
            await send_whole(send, [part async for part in whole])

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


class SseAnswer(RequestAnswer[SseWriter]):
    """Chunks as they come, by ``writer``; those of one event may have ``num_bytes``.

    Until the first event, or the first comment, a failure is a plain HTTP error.
    """

    async def _answer(self, scope: Scope, send: Send) -> None:
        direct = self._direct_writer(scope, self._encode)
        with self._large.reserve(self._request.owner, self._num_bytes), direct:
            await self._submit()
            events = await self._event_queue.take()
            for event in events:
                fails_later = isinstance(event, Finished) and event.usage.completion_tokens > 0
                if isinstance(event, ENDS) and not fails_later:
                    ended(event)  # raises where it failed before its first token
            await send_stream(send, self._pieces(events, direct), _error)

    def _encode(self, tokens: Sequence[TokenEvent]) -> list[bytes]:
        return [self._writer.token(token) for token in tokens]

    async def _pieces(
        self, events: Sequence[Event], direct: DirectWriter[Event]
    ) -> AsyncGenerator[bytes, None]:
        """Those of ``events``, then of the event queue's until all requests have ended."""
        if not events:
            yield self.comment
        while True:
            made: list[bytes] = []
            for event in events:
                written = self._writer.chunks(event)
                if isinstance(written, bytes):
                    made.append(written)
                    continue
                yield b"".join(made)
                made.clear()
                async for part in self._large.parts(written, self._num_bytes):
                    yield part
            if self._is_end(events):
                yield b"".join([*made, self._writer.end()])
                return
            yield b"".join(made)
            refused, events = await direct.take()
            yield b"".join(refused)


def _error(error: RequestError) -> bytes:
    return sse({"error": error_object(error)}) + DONE
