"""One response of server-sent events: its head, its pieces, the direct write, and its end.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.types import Scope, Send

from server.api.direct_write import DirectWriter, Write, writer_of
from server.api.large_responses import PART_BYTES, send_piece
from server.engine.types import Event
from server.errors import RequestError
from server.runtime.event_queue import EventQueue

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class StreamEncoder(Protocol):
    """How a stream's events are written."""

    def encode(self, events: Sequence[Event], /) -> list[bytes]:
        """The server-sent events for ``events``, each of which is given once."""

    def error(self, error: RequestError, /) -> bytes:
        """What ends a stream that fails."""


class EventStream:
    """The body of a stream that has begun: see `event_stream`."""

    def __init__(self, send: Send, write: Write, encoder: StreamEncoder) -> None:
        self._send, self._encoder = send, encoder
        self._direct = DirectWriter(write, encoder.encode)

    async def write(self, body: bytes) -> None:
        """Sends a piece of the body as fast as the client reads it; nothing where it is empty."""
        if len(body) > PART_BYTES:
            await send_piece(self._send, body)
        elif body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def write_events(self, events: Sequence[Event]) -> None:
        await self.write(b"".join(self._encoder.encode(events)))

    async def take(self, event_queue: EventQueue[Event]) -> list[Event]:
        """The next events that are to be written; tokens until then take the direct write."""
        events: list[Event] = []
        while not events:
            refused, events = self._direct.resume(await event_queue.take(self._direct.offer))
            await self.write(b"".join(refused))
        return events


@asynccontextmanager
async def event_stream(
    scope: Scope, send: Send, encoder: StreamEncoder
) -> AsyncIterator[EventStream]:
    """Begins a stream, and ends it with the ``with`` block; a `RequestError` is its last event."""
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    stream = EventStream(send, writer_of(scope), encoder)
    try:
        yield stream
    except RequestError as error:
        await stream.write(encoder.error(error))
    await send({"type": "http.response.body", "body": b""})


def server_sent(data: bytes, kind: bytes | None = None, id: bytes | None = None) -> bytes:
    """One server-sent event of JSON, which has no line breaks."""
    head = b"" if id is None else b"id: %b\n" % id
    if kind is not None:
        head += b"event: %b\n" % kind
    return b"%bdata: %b\n\n" % (head, data)
