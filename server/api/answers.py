"""How answers get to the client: bodies of JSON, server-sent events, tokens by a direct write."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.auth import Caller
from server.api.errors import InvalidApiKey, SessionMigrated
from server.api.schemas.responses import CompletionDetails, PromptDetails, PromptUsage, UsageAnswer
from server.engine.types import (
    Event,
    Failed,
    Finished,
    Migrated,
    Request,
    Started,
    TokenEvent,
    Usage,
)
from server.errors import InternalFailure, RequestError
from server.models.service import Service
from server.runtime.queues import MAX_IN_FLIGHT, EventQueue
from server.sessions.loader import Resumed
from server.sessions.sessions import NO_MORE, KeyInUse
from server.store.base import HistoryGone, Keyed

# Most of a token's cost would be the layers between the engine's event and the
# socket. Where the server offers it (`server.http` does), a write goes there at once,
# from whatever runs in the event loop. Any other ASGI server works without it.
#
# Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html


#: What is handed to the connection at once.
PART_BYTES = 1 << 16
#: A line without effect: it shows proxies and clients that a silent stream is alive.
COMMENT = b": keep-alive\n\n"
#: The same between events with ids: OpenAI's client for Python, once it has read an id, takes an
#: empty line for an event without data, and fails.
COMMENT_BETWEEN_IDS = b": keep-alive\n"
#: Of the interval of comments. A comment comes after the whole interval, or up to one tick earlier.
NUM_TICKS = 4
#: The name of the extension in a scope that has a `Write`.
WRITE_EXTENSION = "everstream.write"

Write = Callable[[Sequence[bytes]], bool]
"""Writes all parts at once, or nothing and returns False where that is not possible now.

Over HTTP the parts are joined to one piece of a body that has begun and has no
declared length; over a WebSocket each is a text frame. After False the caller
sends by ASGI's ``send``, which waits until the client has read.
"""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

T = TypeVar("T")


def writer_of(scope: Scope) -> Write:
    """What ``scope`` offers, or a `Write` that never can."""
    write: Write = scope.get("extensions", {}).get(WRITE_EXTENSION, _never)
    return write


def _never(parts: Sequence[bytes]) -> bool:
    return False


class DirectWriter(Generic[T]):
    """Writes tokens, which are nearly all there is, as soon as ``event_queue`` gets them.

    ``encode`` may count what it encodes: what could not be written is kept encoded. A token may
    come to nothing. While it is entered, `take` returns ``comment`` after ``heartbeat_s`` of
    silence, 0 for none: proxies close connections without data. The time is measured in ticks of a
    timer, so that a token costs no look at the clock.
    """

    def __init__(
        self,
        event_queue: EventQueue[T],
        write: Write,
        encode: Callable[[Sequence[TokenEvent]], list[bytes]],
        heartbeat_s: float = 0.0,
        comment: bytes = COMMENT,
    ) -> None:
        self._event_queue, self._write, self._encode = event_queue, write, encode
        self._comment = comment
        self._tick_s = heartbeat_s / NUM_TICKS
        self._num_silent_ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._refused: list[bytes] = []
        self._num_refused = 0

    def __enter__(self) -> None:
        if self._tick_s:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._num_silent_ticks += 1
        if self._num_silent_ticks >= NUM_TICKS:
            self._event_queue.nudge()
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    async def take(self) -> tuple[list[bytes], list[T]]:
        """The next items that were not written: the parts that were refused, then the others.

        After a nudge of the event queue it is the comment alone.
        """
        self._num_silent_ticks = 0  # what the last call returned was sent
        items = await self._event_queue.take(self._offer)
        if not items:
            return [self._comment], []
        parts, rest = self._refused, items[self._num_refused :]
        self._refused, self._num_refused = [], 0
        return parts, rest

    def _offer(self, items: Sequence[object]) -> bool:
        """For `EventQueue.take`: whether all of ``items`` were tokens, and are written."""
        tokens = [item for item in items if isinstance(item, TokenEvent)]
        if len(tokens) < len(items):
            return False
        parts = self._encode(tokens)
        if self._write(parts):
            if any(parts):
                self._num_silent_ticks = 0
            return True
        self._refused, self._num_refused = parts, len(tokens)
        return False


async def send_stream(
    send: Send,
    pieces: AsyncGenerator[bytes, None],
    error: Callable[[RequestError], bytes],
    headers: Sequence[tuple[bytes, bytes]] = HEADERS,
) -> None:
    """Sends ``pieces`` as fast as the client reads them, those that are not empty.

    ``error`` writes what ends the stream where they raise a `RequestError`.
    """
    await send({"type": "http.response.start", "status": 200, "headers": [*headers]})
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if len(piece) > PART_BYTES:
                    await send_piece(send, piece)
                elif piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
    except RequestError as ended_by:
        await send_piece(send, error(ended_by))
    await send({"type": "http.response.body", "body": b""})


async def send_no_more(send: Send) -> None:
    """To an `EventSource` that has had all events: another status than 204 would bring it back."""
    await send({"type": "http.response.start", "status": 204, "headers": HEADERS[1:2]})
    await send({"type": "http.response.body", "body": b""})


def server_sent(data: bytes, kind: bytes | None = None, id: bytes | None = None) -> bytes:
    """One server-sent event of JSON, which has no line breaks."""
    head = b"" if id is None else b"id: %b\n" % id
    if kind is not None:
        head += b"event: %b\n" % kind
    return b"%bdata: %b\n\n" % (head, data)


def json_response(value: object, status: int = 200) -> Response:
    """``value`` as the body of an answer."""
    return Response(orjson.dumps(value), status, media_type="application/json")


class LargeResponse(Response):
    """A body of JSON that is sent as fast as the client reads it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_whole(send, [bytes(self.body)])


async def send_whole(send: Send, parts: list[bytes]) -> None:
    """A JSON answer, as fast as the client reads it. ``parts`` are gone when they are sent."""
    length = sum(map(len, parts))
    headers = [(b"content-length", b"%d" % length), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if length > PART_BYTES:
        parts.reverse()
        while parts:
            await send_piece(send, parts.pop())
    await send({"type": "http.response.body", "body": b"".join(parts)})


async def send_piece(send: Send, body: bytes) -> None:
    """A piece of a body that continues, of any size."""
    for start in range(0, len(body), PART_BYTES):
        part = body if len(body) <= PART_BYTES else body[start : start + PART_BYTES]
        await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(0)  # a send to a client that reads does not wait


# -------------------------------------------------------------------------------------------------
# What every answer made of a request's events shares: its end, its usage, its last line.


DONE = b"data: [DONE]\n\n"


class LastEventsWriter:
    """Writes JSON of the last event of each request, by its id."""

    def __init__(self, write: Callable[[Mapping[str, Event]], Iterator[bytes]]) -> None:
        self._write = write
        self._lasts: dict[str, Event] = {}

    def add(self, event: Event) -> None:
        self._lasts[event.request_id] = event

    def whole(self) -> Iterator[bytes]:
        return self._write(self._lasts)


def appended_body(ends: Mapping[str, Event]) -> Iterator[bytes]:
    """The JSON answer to an append."""
    (event,) = ends.values()
    last = ended(event)
    if last.finish_reason == "cancelled":
        raise InternalFailure("the session was deleted meanwhile")
    body = {"session": last.session, "position": last.position, "usage": usage_object(last.usage)}
    scored = {} if last.logprobs is None else {"logprobs": last.logprobs}
    yield orjson.dumps(body | scored)


def ended(last: Event) -> Finished:
    """The `Finished` of a request; raises the `RequestError` that it ended by instead."""
    if isinstance(last, Failed):
        raise last.error
    if not isinstance(last, Finished):
        raise SessionMigrated
    if last.finish_reason == "error":
        raise InternalFailure(last.error or "the request failed")
    return last


def sse(value: object) -> bytes:
    """One server-sent event."""
    return server_sent(orjson.dumps(value))


def total_usage(ends: Sequence[Finished]) -> Usage:
    """That of all choices."""
    return Usage(
        sum(end.usage.prompt_tokens for end in ends),
        sum(end.usage.completion_tokens for end in ends),
        sum(end.usage.cached_tokens for end in ends),
        sum(end.usage.reasoning_tokens for end in ends),
        sum(end.usage.accepted_tokens for end in ends),
        sum(end.usage.rejected_tokens for end in ends),
    )


def whole_usage(usage: Usage) -> PromptUsage:
    """OpenAI's ``usage`` at the end of an answer: what the prefix cache had is known then."""
    details: PromptDetails = {"cached_tokens": usage.cached_tokens}
    return {**usage_object(usage), "prompt_tokens_details": details}


def usage_object(usage: Usage) -> UsageAnswer:
    """OpenAI's ``usage``, with what was drafted where anything was."""
    answer: UsageAnswer = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.accepted_tokens or usage.rejected_tokens:
        answer["completion_tokens_details"] = drafted(usage)
    return answer


def drafted(usage: Usage) -> CompletionDetails:
    """How many of the tokens that were drafted were right, and how many were not."""
    return {
        "accepted_prediction_tokens": usage.accepted_tokens,
        "rejected_prediction_tokens": usage.rejected_tokens,
    }


# -------------------------------------------------------------------------------------------------
# An answer that follows the client: when it leaves, what it asked for is given back.


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


# -------------------------------------------------------------------------------------------------
# Answers that submit requests to the engine: one body of JSON, or server-sent events.


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


class StreamWriter(Protocol):
    """Writes the chunks of a stream for events of the engine, and what comes after the last.

    Those of an event that may make large ones come in parts, as in `JsonWriter`. ``headers`` begin
    the answer; ``comment`` shows in silence that the stream is alive, and may be empty. ``error``
    writes what ends a stream that has begun and cannot be finished.
    """

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...
    @property
    def comment(self) -> bytes: ...
    def token(self, event: TokenEvent, /) -> bytes: ...
    def chunks(self, event: Event, /) -> bytes | Iterator[bytes]: ...
    def end(self) -> bytes: ...
    def error(self, error: RequestError, /) -> bytes: ...


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


class StreamAnswer(RequestAnswer[StreamWriter]):
    """Chunks as they come, by ``writer``; those of one event may have ``num_bytes``.

    Until the first event, or the first comment, a failure is a plain HTTP error.
    """

    async def _answer(self, scope: Scope, send: Send) -> None:
        self.comment = self._writer.comment
        direct = self._direct_writer(scope, self._encode)
        with self._large.reserve(self._request.owner, self._num_bytes), direct:
            await self._submit()
            events = await self._event_queue.take()
            for event in events:
                fails_later = isinstance(event, Finished) and event.usage.completion_tokens > 0
                if isinstance(event, ENDS) and not fails_later:
                    ended(event)  # raises where it failed before its first token
            writer, pieces = self._writer, self._pieces(events, direct)
            await send_stream(send, pieces, writer.error, writer.headers)

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
