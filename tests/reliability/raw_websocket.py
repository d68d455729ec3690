"""A WebSocket client without manners: it sends any bytes, and reads only when it is told to.

Plain sockets and RFC 6455 by hand, because a library would refuse to misbehave
and would read in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

LOCAL = "127.0.0.1"
#: After so long a server is stuck.
TIMEOUT_S = 120.0

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
CONTROL = frozenset({CLOSE, PING, PONG})

#: A key of zeros: the payload is on the wire as it is.
NO_MASK = bytes(4)


def handshake(path: str = "/v1/stream", **headers: str | None) -> bytes:
    """An opening handshake. A header given as None is left out; underscores become dashes."""
    all_headers: dict[str, str | None] = {
        "host": LOCAL,
        "upgrade": "websocket",
        "connection": "Upgrade",
        "sec-websocket-version": "13",
        "sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZg==",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"{name}: {value}\r\n" for name, value in all_headers.items() if value is not None]
    return f"GET {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode()


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    fin: bool = True,
    rsv: int = 0,
    mask: bytes | None = NO_MASK,
    length: int | None = None,
    length_bytes: int | None = None,
) -> bytes:
    """One frame (RFC 6455, section 5.2). ``mask`` None sends it bare, as a server would.

    ``length`` is what the header claims, if not the truth; ``length_bytes`` (0, 2
    or 8) the size of the extended length, if not the smallest.
    """
    size = len(payload) if length is None else length
    if length_bytes is None:
        length_bytes = 0 if size < 126 else 2 if size < 1 << 16 else 8
    short = {0: size, 2: 126, 8: 127}[length_bytes]
    head = bytes((fin << 7 | rsv << 4 | opcode, (mask is not None) << 7 | short))
    extended = size.to_bytes(length_bytes) if length_bytes else b""
    if mask is None:
        return head + extended + payload
    masked = payload
    if mask != NO_MASK:
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
    return head + extended + mask + masked


def text(value: object) -> bytes:
    """A text frame with ``value`` as JSON."""
    return frame(TEXT, json.dumps(value).encode())


def closing(code: int = 1000, reason: bytes = b"") -> bytes:
    """A close frame."""
    return frame(CLOSE, struct.pack("!H", code) + reason)


class Ended(Exception):
    """The server has closed the connection, or cut it."""


@dataclass(frozen=True, slots=True)
class Received:
    """A frame of the server. What a server may not send fails where it is read."""

    opcode: int
    payload: bytes

    @property
    def json(self) -> Any:
        assert self.opcode == TEXT, self
        return json.loads(self.payload)

    @property
    def code(self) -> int:
        """The code of a close frame."""
        assert self.opcode == CLOSE, self
        return int(struct.unpack("!H", self.payload[:2])[0])


def frames_of(data: bytes) -> list[Received]:
    """The frames of a server in a stretch of bytes that begins with one; the last may be cut."""
    frames: list[Received] = []
    while len(data) >= 2:
        size, start = data[1], 2
        if size >= 126:
            start = 4 if size == 126 else 10
            size = int.from_bytes(data[2:start])
        frames.append(Received(data[0] & 0x0F, data[start : start + size]))
        data = data[start + size :]
    return frames


class RawWebSocket:
    """One connection; open it with `connected`. Nothing is read unless a method here reads.

    ``head`` is the server's answer to the handshake, ``headers`` its fields by
    lower-case name.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.head = b""
        self._buffer = b""

    async def send(self, data: bytes) -> None:
        """Sends ``data`` as it is; waits while the server takes nothing. Raises `OSError`."""
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def send_bytewise(self, data: bytes) -> None:
        """Sends each byte in a segment of its own."""
        for index in range(len(data)):
            await self.send(data[index : index + 1])
            await asyncio.sleep(0)

    async def ask(self, **message: object) -> None:
        """Sends a message of the protocol."""
        await self.send(text(message))

    async def shake_hands(self, request: bytes) -> None:
        """Sends ``request`` and reads the answer's head. Raises `Ended`."""
        await self.send(request)
        async with asyncio.timeout(TIMEOUT_S):
            while b"\r\n\r\n" not in self._buffer:
                await self._read_more()
        self.head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])

    @property
    def headers(self) -> Mapping[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        pairs = (line.partition(":") for line in lines)
        return {name.strip().lower(): value.strip() for name, _, value in pairs}

    async def receive(self) -> Received:
        """The next frame, checked to be one that a server may send. Raises `Ended`."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._receive()

    async def answer_pings(self) -> None:
        """Reads until cancelled or the server ends, and answers pings as a library would."""
        try:
            while True:
                received = await self._receive()
                if received.opcode == PING:
                    await self.send(frame(PONG, received.payload))
        except (Ended, OSError):
            return

    async def _receive(self) -> Received:
        first, second = await self._take(2)
        opcode, size = first & 0x0F, second & 0x7F
        assert first & 0xF0 == 0x80, f"fragmented or reserved bits: {first:#x}"
        assert second < 0x80, "a server's frame is never masked"
        assert opcode in (TEXT, CLOSE, PING, PONG), opcode
        assert size < 126 or opcode not in CONTROL, size
        if size >= 126:
            size = int.from_bytes(await self._take(2 if size == 126 else 8))
        return Received(opcode, await self._take(size))

    async def receive_json(self) -> Any:
        """The next message; pings are answered, as a library would. Raises `Ended`."""
        while (received := await self.receive()).opcode != TEXT:
            if received.opcode == CLOSE:
                raise Ended(f"closed with {received.code}")
            if received.opcode == PING:
                with contextlib.suppress(OSError):
                    await self.send(frame(PONG, received.payload))
        return received.json

    async def receive_until(self, type: str) -> list[Any]:
        """All messages up to the first of ``type``, with it."""
        messages = [await self.receive_json()]
        while messages[-1]["type"] != type:
            messages.append(await self.receive_json())
        return messages

    async def close_code(self) -> int | None:
        """Reads up to the end of the connection; the code of the close frame, if there was one.

        Answers that frame, which nothing may follow. Raises `TimeoutError` where
        the server keeps the connection.
        """
        code = None
        try:
            while True:
                received = await self.receive()
                assert code is None, f"{received} after the close frame"
                if received.opcode == CLOSE:
                    code = received.code
                    with contextlib.suppress(OSError):
                        await self.send(frame(CLOSE, received.payload[:2]))
        except Ended:
            return code

    async def ended(self) -> None:
        """Reads and forgets everything up to the end, whatever it is."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                while True:
                    self._buffer = b""
                    await self._read_more()
            except Ended:
                return

    def abort(self) -> None:
        """Leaves with a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    async def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._read_more()
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    async def _read_more(self) -> None:
        try:
            data = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)
        except ConnectionError as error:
            raise Ended(str(error)) from error
        if not data:
            raise Ended("end of stream")
        self._buffer += data


@asynccontextmanager
async def connected(port: int, room_bytes: int | None = None) -> AsyncIterator[RawWebSocket]:
    """A TCP connection on which nothing was said yet; closed at the end of the block.

    ``room_bytes`` bounds what the kernel takes for a client that does not read.
    """
    connection = socket.socket()
    try:
        if room_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (LOCAL, port))
        yield RawWebSocket(connection)
    finally:
        connection.close()


@asynccontextmanager
async def opened(port: int, room_bytes: int | None = None) -> AsyncIterator[RawWebSocket]:
    """A connection after its handshake with `/v1/stream`."""
    async with connected(port, room_bytes) as client:
        await client.shake_hands(handshake())
        assert client.status == 101, client.head
        yield client
