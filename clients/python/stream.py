"""The requests of a client over its WebSocket, which is reconnected when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from .backoff import Backoff
from .connection import Connection, dial, is_for_good
from .errors import ConnectionLost, EverstreamError, ProtocolError
from .events import Event
from .inbox import Inbox, is_passing
from .inboxes import Inboxes
from .protocol import Answer, Protocol
from .request import EndMessage, Request

CLOSED = "the client was closed"


class Stream:
    """Connects when the first request is sent, and reconnects after a connection is lost.

    Lost requests are recovered if possible, within ``reconnect_s``. All methods except
    `abandon` must be called from one event loop. A request that `start` has sent is
    over when `is_open` returns False.
    """

    _loop: asyncio.AbstractEventLoop  # set by the first connection

    def __init__(
        self, protocol: Protocol, timeout_s: float, reconnect_s: float, backoff: Backoff
    ) -> None:
        self._protocol = protocol
        self._timeout_s, self._reconnect_s = timeout_s, reconnect_s
        self._backoff = backoff
        self._connection: Connection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._inboxes = Inboxes()
        self._tasks: set[asyncio.Task[None]] = set()
        self._was_connected = False
        self._closed = False

    async def close(self) -> None:
        """Closes the connection and ends every request."""
        self._closed = True
        if self._connection is not None:
            await self._connection.close()
        self._inboxes.fail(ConnectionLost(CLOSED))
        for task in self._tasks:
            if task is not self._reader:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def start(self, request: Request, arrived: asyncio.Event) -> None:
        """Sends a request; ``arrived`` is set when `next` may have something to return."""
        connection = await self._connected()
        self._inboxes.open(request, arrived.set)
        with contextlib.suppress(ConnectionClosed):  # `_read` handles the end for all requests
            await connection.send(request.message, text=True)

    async def ask(self, kind: str, answer: type[Answer], **fields: object) -> Answer:
        """Sends a request that has one answer, and returns the answer."""
        request = self._protocol.request(kind, **fields)
        arrived = asyncio.Event()
        try:
            await self.start(request, arrived)
            (event, *_) = await self.next(request.request_id, arrived)
            return self._protocol.expected(self._protocol.checked(event), answer)
        finally:
            self._abandon(request.request_id)

    def is_open(self, request_id: str) -> bool:
        """Returns whether `next` may still return something."""
        return self._inboxes.is_open(request_id)

    async def next(self, request_id: str, arrived: asyncio.Event) -> list[Event]:
        """Waits for events of an open request and returns all that have arrived.

        Gives none where another reader has taken the last ones: Ctrl-C may leave one behind.
        The server pings while a request waits or reads a long prompt, so silence is a failure.
        """
        while not (events := self._inboxes.take(request_id)):
            arrived.clear()
            silent_since_s = max(self._loop.time(), self._heard_s)
            while not await self._arrives(arrived, silent_since_s + self._timeout_s):
                if self._inboxes.is_being_recovered(request_id):
                    break  # the recovery has its own time limit
                if self._heard_s <= silent_since_s:
                    self._inboxes.abandon(request_id, "detach")
                    self._attend()
                    raise ConnectionLost(f"no event within {self._timeout_s:g} s, and no ping")
                silent_since_s = self._heard_s
            if not self.is_open(request_id):
                return []
        return events

    @property
    def _heard_s(self) -> float:
        return 0.0 if self._connection is None else self._connection.heard_s

    async def _arrives(self, arrived: asyncio.Event, until_s: float) -> bool:
        try:
            async with asyncio.timeout_at(until_s):
                return await arrived.wait()
        except TimeoutError:
            return False

    def request_end(self, end_message: EndMessage) -> None:
        """Sends the message that ends a request; the caller still reads its last events."""
        self._inboxes.request_end(end_message)
        self._attend()

    def abandon(self, request_id: str) -> None:
        """Cancels a request without a reader if it still runs. Callable from any thread."""
        if self._inboxes.is_open(request_id):
            with contextlib.suppress(RuntimeError):  # the loop, and so the socket, is closed
                self._loop.call_soon_threadsafe(self._abandon, request_id)

    def _abandon(self, request_id: str) -> None:
        self._inboxes.abandon(request_id)
        self._attend()

    # The connection

    async def _connected(self) -> Connection:
        """Returns an open connection, after a reconnect if necessary."""
        async with self._connecting:
            if self._reader is not None and not self._is_connected:
                await asyncio.wait([self._reader])  # it hands lost requests over to recovery first
            if self._connection is None:
                self._connection = await self._connect()
                self._reader = self._spawn(self._read(self._connection))
            return self._connection

    @property
    def _is_connected(self) -> bool:
        return self._connection is not None and self._connection.state is State.OPEN

    async def _connect(self) -> Connection:
        """Opens a connection. Retries only after an earlier success: the address is right."""
        self._loop = asyncio.get_running_loop()
        attempts = self._backoff.attempts(self._reconnect_s)
        while True:
            self._check_open()
            try:
                connection = await dial(self._protocol, self._timeout_s)
            except EverstreamError as error:
                if not (self._was_connected and is_passing(error)):
                    raise
                await attempts.wait(error)
                continue
            self._was_connected = True
            if self._closed:
                await connection.close()
            self._check_open()
            return connection

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLost(CLOSED)

    async def _read(self, connection: Connection) -> None:
        """Delivers frames until the connection ends, without waiting for slow readers."""
        ended: EverstreamError
        try:
            while True:
                if (event := self._protocol.event(await connection.recv())) is not None:
                    self._inboxes.deliver(event)
                self._attend()
        except ConnectionClosed as closed:
            ended, for_good = ConnectionLost(f"the connection ended: {closed}"), is_for_good(closed)
        except ProtocolError as error:
            ended, for_good = error, True
        self._connection = None
        if self._closed:
            ended, for_good = ConnectionLost(CLOSED), True
        self._inboxes.lose(ended, for_good or self._reconnect_s <= 0)
        self._attend()
        await connection.close()

    # Recovery and end messages

    def _attend(self) -> None:
        """Starts the recoveries and end messages that the inboxes have queued."""
        while self._inboxes.lost:
            inbox, error = self._inboxes.lost.popleft()
            if not inbox.is_being_recovered:
                inbox.is_being_recovered = True
                self._spawn(self._recover(inbox, error))
        if self._inboxes.end_messages:
            self._spawn(self._send_end_messages())

    async def _recover(self, inbox: Inbox, error: EverstreamError) -> None:
        """Sends a lost request again, on a new connection if necessary.

        The answer, or the end of that connection, then determines how it continues.
        """
        inbox.attempts = inbox.attempts or self._backoff.attempts(self._reconnect_s)
        try:
            await inbox.attempts.wait(error)
            connection = await self._connected()
        except EverstreamError as failure:
            inbox.give_up(failure)
            return
        finally:
            inbox.is_being_recovered = False
        if not self._inboxes.is_wanted(inbox):
            return
        with contextlib.suppress(ConnectionClosed):
            await connection.send(inbox.again(), text=True)
            if inbox.end_message is not None:
                await connection.send(self._protocol.ending(inbox.end_message), text=True)
        inbox.wake()  # restarts the reader's timeout for this connection

    async def _send_end_messages(self) -> None:
        while self._inboxes.end_messages and self._connection is not None:
            message = self._protocol.ending(self._inboxes.end_messages.popleft())
            with contextlib.suppress(ConnectionClosed):
                await self._connection.send(message, text=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
