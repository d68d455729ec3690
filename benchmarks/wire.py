"""Clients that cost little: one that counts tokens, and a WebSocket to `/v1/stream`.

Both are protocols of asyncio, which cost less than its streams do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from benchmarks.process import LOCAL
from benchmarks.websocket import CLOSE, PING, PONG, TEXT, FrameParser, Received, frame, handshake

#: In the events of tokens of all protocols but OpenAI's chats.
TOKEN_MARK = b'"position":'

Frame = dict[str, Any]


async def connect(connection: asyncio.BaseProtocol, port: int) -> None:
    """Connects to a port of the loopback."""
    await asyncio.get_running_loop().create_connection(lambda: connection, LOCAL, port)


def post(path: str, body: bytes) -> bytes:
    """A POST as it goes over the wire."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Opening(NamedTuple):
    """What a client sends: at once, and after the first answer."""

    head: bytes
    rest: bytes = b""
    #: Once in every event of a token that comes back.
    mark: bytes = TOKEN_MARK


class Counter(asyncio.Protocol):
    """Sends ``opening``, counts the tokens that come back and notes the times between arrivals."""

    def __init__(self, opening: Opening) -> None:
        self._opening, self._mark = opening, opening.mark
        self._tail = b""
        self._last_s = time.perf_counter()
        self.num_tokens = self.num_reads = self.num_bytes = 0
        self.gaps_s: list[float] = []
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._opening.head)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.gaps_s.append(now - self._last_s)
        self._last_s = now
        if self.num_reads == 0:
            self._transport.write(self._opening.rest)
        self.num_reads += 1
        self.num_bytes += len(data)
        self.num_tokens += (self._tail + data).count(self._mark)
        self._tail = data[1 - len(self._mark) :]

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True

    def abort(self) -> None:
        """Ends the connection without a word."""
        self._transport.abort()


class Wire(asyncio.Protocol):
    """Sends ``message`` once it is connected; ``on_text`` gets each frame's JSON as it arrives.

    ``ended`` is done when the connection is, or with what ``on_text`` raises.
    """

    def __init__(self, message: Frame, on_text: Callable[[bytes], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._message, self._on_text = frame(TEXT, orjson.dumps(message)), on_text
        self._transport: asyncio.Transport | None = None
        self._parser = FrameParser()
        self._has_asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(handshake())

    def data_received(self, data: bytes) -> None:
        try:
            self._take(self._parser.feed(data))
        except Exception as error:
            if not self.ended.done():
                self.ended.set_exception(error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def abort(self) -> None:
        """Ends the connection without a word, as a crash would."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def _take(self, frames: list[Received]) -> None:
        if self._parser.head and not self._has_asked:
            if self._parser.status != 101:  # it is full, or about to stop
                self.abort()
                return
            self._has_asked = True
            self._write(self._message)
        for received in frames:
            if received.opcode == TEXT:
                self._on_text(received.payload)
            elif received.opcode == PING:
                self._write(frame(PONG, received.payload))
            elif received.opcode == CLOSE:
                self.abort()
