"""A WebSocket client that sends any bytes, and reads only when it is told to.

Plain sockets, because a library would refuse to misbehave and would read in the
background. The frames are those of `benchmarks.websocket`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.websocket import (
    CLOSE,
    PING,
    PONG,
    TEXT,
    FrameParser,
    Received,
    frame,
    handshake,
    text,
)

LOCAL = "127.0.0.1"
#: After so long a server is stuck.
TIMEOUT_S = 120.0


class Ended(Exception):
    """The server has closed the connection, or cut it."""


class RawWebSocket:
    """One connection; open it with `connected`. Nothing is read unless a method here reads.

    ``head``, ``status`` and ``headers`` are of the server's answer to the handshake.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._parser = FrameParser()
        self._received: deque[Received] = deque()

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
            while not self.head:
                self._received += self._parser.feed(await self._read())

    @property
    def head(self) -> bytes:
        return self._parser.head

    @property
    def status(self) -> int:
        return self._parser.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._parser.headers

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
        while not self._received:
            self._received += self._parser.feed(await self._read())
        return self._received.popleft()

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
                    await self._read()
            except Ended:
                return

    def abort(self) -> None:
        """Leaves with a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    async def _read(self) -> bytes:
        try:
            data = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)
        except ConnectionError as error:
            raise Ended(str(error)) from error
        if not data:
            raise Ended("end of stream")
        return data


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
