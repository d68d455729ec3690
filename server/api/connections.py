"""What is open: connections, silent ones included, and WebSockets with their tasks."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Container, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from server.api.answers import DirectWriter, Write, writer_of
from server.api.auth import REVOKED, SUBPROTOCOL, Caller
from server.engine.types import Event
from server.errors import RequestError
from server.models.registry import Models
from server.runtime.async_engine import AsyncEngine
from server.runtime.queues import MAX_IN_FLIGHT, EventQueue, ReaderTooSlow

# -------------------------------------------------------------------------------------------------
# Every open connection, and which of them carry a request.
#
# A bound on requests alone would let connections that send nothing take every
# descriptor. Each connection counts from its accept to its end. When there is no
# room for another one, the connection that has carried no request for the longest
# time is closed.

#: The name of the extension in a scope that has the `OpenConnection`, or None.
CONNECTION_EXTENSION = "everstream.connection"
DEFAULT_MAX_CONNECTIONS = 4096
#: Connections beyond a bound, so that `/health` is answered and the excess gets an answer.
SPARE = 16
#: The address of all connections from trusted proxies.
PROXY = "proxy"
#: Idle connections among which one without unsent data is looked for.
MAX_LOOK = 16


@dataclass(eq=False, slots=True)
class OpenConnection:
    """One connection: `made` when it has a transport, `lost` when that has ended."""

    table: ConnectionTable
    address: str
    groups: Sequence[_Group]
    transport: asyncio.Transport | None = None
    is_open: bool = True

    def made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.table.mark_idle(self)

    def lost(self) -> None:
        """May be called again."""
        if self.is_open:
            self.is_open, self.transport = False, None
            self.table.remove(self)

    @property
    def has_unsent_data(self) -> bool:
        return self.transport is not None and self.transport.get_write_buffer_size() > 0


@dataclass(slots=True)
class _Group:
    """The connections of all, or of one address; ``idle`` is ordered, the longest idle first."""

    max_admitted: int
    num_admitted: int = 0
    num_open: int = 0
    idle: dict[OpenConnection, None] = field(default_factory=dict)

    @property
    def has_room(self) -> bool:
        return self.num_open < self.max_admitted + SPARE

    def longest_idle(self) -> OpenConnection | None:
        """The one to close first; one that still sends its last answer comes after others."""
        oldest = list(islice(self.idle, MAX_LOOK))
        silent = (each for each in oldest if not each.has_unsent_data)
        return next(silent, oldest[0] if oldest else None)


class ConnectionTable:
    """At most ``max_connections`` carry a request or are sockets; `SPARE` more may be open.

    The same holds for those of one client address with ``max_per_address``, where it
    is given. The connections of ``proxies`` have many clients, so there it holds for the
    requests of each. Belongs to one event loop.
    """

    def __init__(
        self,
        max_connections: int,
        max_per_address: int | None = None,
        proxies: Container[object] = (),
    ) -> None:
        self._max_per_address = max_connections if max_per_address is None else max_per_address
        self._proxies = proxies
        self._all = _Group(max_connections)
        self._by_address: dict[str, _Group] = {}

    @property
    def num_open(self) -> int:
        return self._all.num_open

    # Connections, as they are accepted

    @property
    def has_room(self) -> bool:
        """Whether another connection may be accepted."""
        return self._all.has_room

    def address_of_peer(self, host: str) -> str:
        """What a connection from ``host`` counts as."""
        return PROXY if host in self._proxies else address_of(host)

    def add(self, address: str) -> OpenConnection | None:
        """A connection that was accepted; None where its address has too many."""
        groups = self._groups(address)
        if not groups[1].has_room and not self._close_longest_idle(groups[1]):
            return None
        for group in groups:
            group.num_open += 1
        return OpenConnection(self, address, groups)

    def close_longest_idle(self) -> bool:
        """Closes one without a request; its descriptor is free in the event loop's next turn."""
        return self._close_longest_idle(self._all)

    def mark_idle(self, connection: OpenConnection) -> None:
        for group in connection.groups:
            group.idle[connection] = None

    def remove(self, connection: OpenConnection) -> None:
        for group in connection.groups:
            group.num_open -= 1
            group.idle.pop(connection, None)
        self._forget_unused(connection.address)

    # Requests

    def admit(self, address: str, connection: OpenConnection | None) -> bool:
        """Whether a request may begin; `release` ends it.

        ``connection`` is None behind a server that does not count its connections.
        """
        groups = self._groups(address)
        if any(group.num_admitted >= group.max_admitted for group in groups):
            self._forget_unused(address)
            return False
        for group in groups:
            group.num_admitted += 1
        if connection is not None:
            for group in connection.groups:
                group.idle.pop(connection, None)
        return True

    def release(self, address: str, connection: OpenConnection | None) -> None:
        for group in self._groups(address):
            group.num_admitted -= 1
        if connection is not None and connection.is_open:
            self.mark_idle(connection)
        self._forget_unused(address)

    def _groups(self, address: str) -> tuple[_Group, _Group]:
        """That of all connections, and that of one address."""
        num = self._all.max_admitted if address == PROXY else self._max_per_address
        return self._all, self._by_address.setdefault(address, _Group(num))

    def _forget_unused(self, address: str) -> None:
        group = self._by_address.get(address)
        if group is not None and not group.num_open and not group.num_admitted:
            del self._by_address[address]

    def _close_longest_idle(self, group: _Group) -> bool:
        connection = group.longest_idle()
        if connection is None or connection.transport is None:
            return False
        for each in connection.groups:
            each.idle.pop(connection, None)
        connection.transport.abort()
        return True


def address_of(host: str) -> str:
    """What a client at ``host`` counts as. Of IPv6 the network: one client has all of a /64."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a Unix socket has no address
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.IPv6Network((address, 64), strict=False))


# -------------------------------------------------------------------------------------------------
# Open WebSockets: each a reader task, a sender task, and a bounded event queue between.
#
# The reader always reads, so that pings, pongs and cancels get through whatever the
# sender does. Everything to the client goes through the event queue, in order; while it
# is too full, the socket's requests are parked. While it is empty and the client reads,
# tokens take the direct write and wake no task. What the messages and frames mean is
# the codec's: `/v1/stream` has one, `/v1/responses` another.


@dataclass(frozen=True, slots=True)
class Close:
    """Ends the socket after what was sent before it."""

    code: int
    reason: str


class SocketCodec(Protocol):
    """The protocol of a socket: what its messages ask for, and how events are written."""

    async def receive(self, text: str | None, /) -> None:
        """Handles one message; None for one that is not text."""

    def frames(self, events: Sequence[Event], /) -> list[bytes]:
        """Encodes ``events``; each is given once."""

    def close_due(self) -> Close | None:
        """Whether the socket is to be closed by now; asked after each batch of frames."""


class Socket:
    """A WebSocket that was accepted. ``ended`` is done when nothing more is sent on it.

    ``event_queue`` is the sink of all its requests; bytes in it are frames.
    """

    def __init__(self, max_queued_events: int, receive: Receive, send: Send, write: Write) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.event_queue: EventQueue[Event | bytes | Close] = EventQueue(
            max_queued_events, self._on_backpressure, MAX_IN_FLIGHT
        )
        self._receive, self._send, self._write = receive, send, write
        self._engines: set[AsyncEngine] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, codec: SocketCodec) -> None:
        """Serves the socket until either side closes it; then ends what still runs."""
        reader = asyncio.create_task(self._read_all(codec))
        sender = asyncio.create_task(self._send_all(codec))
        broken = self.event_queue.broken
        try:
            watched: set[asyncio.Future[Any]] = {reader, sender, broken}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for async_engine in self._engines:
                async_engine.requests.release(self.event_queue)
            await _stop(reader, sender, *self._tasks)
        if broken.done():
            await self._send_close(_close_for(broken.result()))

    def close(self, code: int, reason: str) -> None:
        """Closes the socket after everything that waits in its event queue."""
        self.event_queue.put([Close(code, reason)])

    def reply(self, frame: bytes) -> None:
        """Sends a frame after everything that waits in the event queue."""
        self.event_queue.put([frame])

    def uses(self, async_engine: AsyncEngine) -> None:
        """Says that requests of this socket run there: they are parked, and released, with it."""
        self._engines.add(async_engine)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` next to the reader; it is cancelled when the socket ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_backpressure(self, is_full: bool) -> None:
        """Parks the requests of a client that does not keep up, until it has."""
        for async_engine in self._engines:
            (async_engine.requests.hold if is_full else async_engine.requests.unhold)(
                self.event_queue
            )

    async def _read_all(self, codec: SocketCodec) -> None:
        while (message := await self._receive())["type"] != "websocket.disconnect":
            await codec.receive(message.get("text"))

    async def _send_all(self, codec: SocketCodec) -> None:
        """Until the socket is closed, or cannot be written."""
        direct = DirectWriter(self.event_queue, self._write, codec.frames)
        with contextlib.suppress(OSError, RequestError):
            close: Close | None = None
            while close is None:
                frames, items = await direct.take()
                for item in items:
                    if isinstance(item, Close):
                        close = item
                        break
                    frames += [item] if isinstance(item, bytes) else codec.frames([item])
                await self._send_frames(frames)
                close = close or codec.close_due()
            await self._send_close(close)

    async def _send_frames(self, frames: list[bytes]) -> None:
        if self._write(frames):
            return
        for frame in frames:
            await self._send({"type": "websocket.send", "text": frame.decode()})

    async def _send_close(self, close: Close) -> None:
        message = {"type": "websocket.close", "code": close.code, "reason": close.reason}
        with contextlib.suppress(OSError, RuntimeError):  # the client may have closed first
            await self._send(message)


def _close_for(error: RequestError) -> Close:
    """How a socket ends whose event queue is broken."""
    if isinstance(error, ReaderTooSlow):
        return Close(1008, "the client reads too slowly")
    return Close(1011, "the engine has stopped")


async def _stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


#: How a socket ends whose server stops.
DRAINING = (1012, "the server is draining")

#: Makes the codec of one socket.
MakeCodec = Callable[[Models, Caller, Socket], SocketCodec]


class Sockets:
    """Each socket is added when it opens, and taken out when it has ended."""

    def __init__(self) -> None:
        self._open: set[Socket] = set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, socket: Socket) -> None:
        self._open.add(socket)

    def discard(self, socket: Socket) -> None:
        self._open.discard(socket)

    async def close(self, timeout_s: float) -> None:
        """Ends every socket with 1012 after what its event queue holds, or gives up on it."""
        sockets = list(self._open)
        for socket in sockets:
            socket.close(*DRAINING)
        if sockets:
            await asyncio.wait([socket.ended for socket in sockets], timeout=timeout_s)


class SocketEndpoint:
    """The ASGI application of a WebSocket route, whose sockets speak by ``make_codec``."""

    def __init__(self, models: Models, sockets: Sockets, make_codec: MakeCodec) -> None:
        self._models, self._sockets, self._make_codec = models, sockets, make_codec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope["state"]["caller"]
        offered = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        await receive()
        await send({"type": "websocket.accept", "subprotocol": offered})
        max_events = self._models.default.max_queued_events
        socket = Socket(max_events, receive, send, writer_of(scope))
        self._sockets.add(socket)
        try:
            if not self._models.takes_sockets:
                socket.close(*DRAINING)
            with caller.watched(lambda: socket.close(*REVOKED)):
                await socket.run(self._make_codec(self._models, caller, socket))
        finally:
            self._sockets.discard(socket)
            socket.ended.set_result(None)
