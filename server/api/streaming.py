"""How streams get to the client: tokens by a direct write, all else by ASGI's ``send``.

Most of a token's cost would be the layers between the engine's event and the
socket. Where the server offers it (`server.http` does), a write goes there at once,
from whatever runs in the event loop. Any other ASGI server works without it.

Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.types import Scope, Send

from server.api.json_response import PART_BYTES, send_piece
from server.engine.types import TokenEvent
from server.errors import RequestError
from server.runtime.event_queue import EventQueue

#: A line without effect: it shows proxies and clients that a silent stream is alive.
COMMENT = b": keep-alive\n\n"
#: The name of the extension in a scope.
EXTENSION = "everstream.write"

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
    write: Write = scope.get("extensions", {}).get(EXTENSION, _never)
    return write


def _never(parts: Sequence[bytes]) -> bool:
    return False


class DirectWriter:
    """Writes tokens, which are nearly all there is, as soon as an event queue gets them.

    An encoder may count what it encodes: what could not be written is kept encoded.
    ``num_silent_ticks`` belongs to a `server.api.heartbeat.Heartbeat`.
    """

    def __init__(self, write: Write, encode: Callable[[Sequence[TokenEvent]], list[bytes]]) -> None:
        self._write, self._encode = write, encode
        self.num_silent_ticks = 0
        self._refused: list[bytes] = []
        self._num_refused = 0

    async def take(self, event_queue: EventQueue[T]) -> tuple[list[bytes], list[T]]:
        """The next items that were not written: the parts that were refused, then the others.

        After a nudge of the event queue it is a `COMMENT` alone.
        """
        self.num_silent_ticks = 0  # what the last call returned was sent
        items = await event_queue.take(self._offer)
        if not items:
            return [COMMENT], []
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
            self.num_silent_ticks = 0
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


def server_sent(data: bytes, kind: bytes | None = None, id: bytes | None = None) -> bytes:
    """One server-sent event of JSON, which has no line breaks."""
    head = b"" if id is None else b"id: %b\n" % id
    if kind is not None:
        head += b"event: %b\n" % kind
    return b"%bdata: %b\n\n" % (head, data)
