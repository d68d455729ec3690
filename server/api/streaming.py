"""How answers get to the client: bodies of JSON, server-sent events, tokens by a direct write.

Most of a token's cost would be the layers between the engine's event and the
socket. Where the server offers it (`server.http` does), a write goes there at once,
from whatever runs in the event loop. Any other ASGI server works without it.

Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.engine.types import TokenEvent
from server.errors import RequestError
from server.runtime.event_queue import EventQueue

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
