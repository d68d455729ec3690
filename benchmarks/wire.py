"""Clients that cost little: one that counts tokens, and a WebSocket to `/v1/stream`.

Masks are zero. Servers send whole text frames, so nothing else is understood.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from benchmarks.process import LOCAL

HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)

#: Once in every event of a token.
TOKEN_MARK = b'"position":'

Frame = dict[str, Any]

_TEXT, _CLOSE, _PING, _PONG = 0x1, 0x8, 0x9, 0xA
SWITCHED = b"HTTP/1.1 101 "


async def connect(connection: asyncio.BaseProtocol, port: int) -> None:
    """Connects to a port of the loopback."""
    await asyncio.get_running_loop().create_connection(lambda: connection, LOCAL, port)


def masked(payload: bytes, opcode: int = _TEXT) -> bytes:
    """A frame of a client, the mask being zero."""
    length = len(payload)
    assert length < 1 << 16, length
    size = bytes((0x80 | length,)) if length < 126 else b"\xfe" + length.to_bytes(2, "big")
    return bytes((0x80 | opcode,)) + size + bytes(4) + payload


def post(path: str, body: bytes) -> bytes:
    """A POST as it goes over the wire."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Opening(NamedTuple):
    """What a client sends: at once, and after the first answer."""

    head: bytes
    rest: bytes = b""


class Counter(asyncio.Protocol):
    """Sends ``opening``, counts the tokens that come back and notes the times between arrivals."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
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
        self.num_tokens += (self._tail + data).count(TOKEN_MARK)
        self._tail = data[1 - len(TOKEN_MARK) :]

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
        self._message, self._on_text = masked(orjson.dumps(message)), on_text
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._switched = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(HANDSHAKE)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        if not self._switched:
            head, end, data = data.partition(b"\r\n\r\n")
            if not end:
                self._rest = head
                return
            if not head.startswith(SWITCHED):  # it is full, or about to stop
                self.abort()
                return
            self._switched = True
            self._write(self._message)
        try:
            self._rest = self._take(data)
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

    def _take(self, data: bytes) -> bytes:
        """Understands whole frames; what is left."""
        start, length = 0, len(data)
        while length - start >= 2:
            body, size = start + 2, data[start + 1]
            if size >= 126:
                body += 2 if size == 126 else 8
                size = int.from_bytes(data[start + 2 : body], "big")
            if length < body + size or length < body:
                break
            opcode, payload = data[start] & 0xF, data[body : body + size]
            start = body + size
            if opcode == _TEXT:
                self._on_text(payload)
            elif opcode == _PING:
                self._write(masked(payload, _PONG))
            elif opcode == _CLOSE:
                self.abort()
        return data[start:]
