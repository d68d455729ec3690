"""The WebSocket of the client for asyncio: one task reads, and every request has its waiter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from clients.python.errors import ConnectionLost, EverstreamError, ProtocolError
from clients.python.events import Event
from clients.python.inbox import Farewell, Inboxes
from clients.python.protocol import Answer, Protocol, handshake_error


class AsyncSocket:
    """Requests over one connection, which is made when the first of them is sent.

    All methods but `abandon` belong to one event loop. A request that `start` has
    begun is over when `is_open` says so.
    """

    _loop: asyncio.AbstractEventLoop  # known from the first connection on

    def __init__(self, protocol: Protocol, timeout_s: float) -> None:
        self._protocol = protocol
        self._timeout_s = timeout_s
        self._connection: ClientConnection | None = None
        self._connecting = asyncio.Lock()
        self._inboxes = Inboxes()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def close(self) -> None:
        """Ends the connection and every request."""
        self._closed = True
        if self._connection is not None:
            await self._connection.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def start(
        self, request_id: str, message: bytes, arrived: asyncio.Event, follows: bool = False
    ) -> None:
        """Sends a request; ``arrived`` is set whenever `next` may have something."""
        connection = await self._connected()
        self._inboxes.open(request_id, arrived.set, follows)
        try:
            await connection.send(message, text=True)
        except ConnectionClosed as error:
            self._inboxes.abandon(request_id)
            raise ConnectionLost(f"the connection ended: {error}") from error

    async def ask(self, kind: str, answer: type[Answer], **fields: object) -> Answer:
        """Sends a request that has one answer, and waits for it."""
        request_id, message = self._protocol.message(kind, **fields)
        arrived = asyncio.Event()
        try:
            await self.start(request_id, message, arrived)
            return self._protocol.expected(await self.next(request_id, arrived), answer)
        finally:
            self.abandon(request_id)

    def is_open(self, request_id: str) -> bool:
        """Whether `next` may still give something."""
        return self._inboxes.is_open(request_id)

    async def next(self, request_id: str, arrived: asyncio.Event) -> Event:
        """The next event of an open request."""
        event = self._inboxes.take(request_id)
        try:
            async with asyncio.timeout(self._timeout_s if event is None else None):
                while event is None:
                    arrived.clear()
                    await arrived.wait()
                    event = self._inboxes.take(request_id)
        except TimeoutError as error:
            self._inboxes.abandon(request_id, "detach")
            self._spawn_farewells()
            raise ConnectionLost(f"no event within {self._timeout_s:g} s") from error
        return self._protocol.checked(event)

    async def bid(self, farewell: Farewell) -> None:
        """Asks for the end of a request. Where the socket has ended, its reader says so."""
        if self._connection is not None:
            with contextlib.suppress(ConnectionClosed):
                await self._connection.send(self._protocol.farewell(farewell), text=True)

    def abandon(self, request_id: str) -> None:
        """Cancels a request that nobody reads any more, if it still runs. From any thread."""
        if self._inboxes.is_open(request_id):
            self._inboxes.abandon(request_id)
            with contextlib.suppress(RuntimeError):  # the loop is closed, so the socket is too
                self._loop.call_soon_threadsafe(self._spawn_farewells)

    def _spawn_farewells(self) -> None:
        if self._inboxes.farewells:
            self._spawn(self._say_farewells())

    async def _say_farewells(self) -> None:
        while self._inboxes.farewells:
            await self.bid(self._inboxes.farewells.popleft())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self) -> ClientConnection:
        async with self._connecting:
            if self._closed:
                raise ConnectionLost("the client was closed")
            if self._connection is None:
                self._loop = asyncio.get_running_loop()
                self._connection = await self._connect()
                self._spawn(self._read(self._connection))
            return self._connection

    async def _connect(self) -> ClientConnection:
        try:
            return await connect(
                self._protocol.stream_url,
                additional_headers=self._protocol.headers,
                compression=None,
                max_size=None,
                open_timeout=self._timeout_s,
            )
        except InvalidHandshake as error:
            raise handshake_error(error) from error
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(f"cannot reach {self._protocol.stream_url}: {error}") from error

    async def _read(self, connection: ClientConnection) -> None:
        """Delivers frames until the socket ends; it never waits for a reader of events."""
        ended: EverstreamError = ConnectionLost("the connection was closed")
        try:
            async for frame in connection:
                if (event := self._protocol.event(frame)) is not None:
                    self._inboxes.deliver(event)
                self._spawn_farewells()
        except ConnectionClosed as error:
            ended = ConnectionLost(f"the connection ended: {error}")
        except ProtocolError as error:
            ended = error
        finally:
            self._connection = None
            self._inboxes.fail(ended)
            await connection.close()
