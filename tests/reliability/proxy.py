"""A TCP proxy that breaks connections in the ways that networks do.

Every fault is set per direction, for connections to come (`FaultProxy.to_server`,
`FaultProxy.to_client`) or on a live one (the same names of a `Link`): a delay, or
an unannounced silence. A live one can also be cut.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

LOCAL = "127.0.0.1"
READ_BYTES = 1 << 16
#: Under way in one direction; a sender that is faster has to wait.
MAX_PIECES = 64

Piece = tuple[float, bytes]


@dataclass
class Direction:
    """What happens to the bytes of one direction; looked at anew for each piece.

    ``delay_s`` holds every piece back without slowing the flow. What comes after
    ``swallow_after_bytes`` is acknowledged and thrown away, and so is the end of
    the stream: the connection is half open. ``num_bytes`` counts what passed,
    ``swallowed`` is what did not.
    """

    delay_s: float = 0.0
    swallow_after_bytes: int | None = None
    num_bytes: int = 0
    swallowed: bytes = b""

    def swallow(self) -> None:
        """Nothing passes from now on, and neither side is told."""
        self.swallow_after_bytes = self.num_bytes

    def split(self, data: bytes) -> tuple[bytes, bytes]:
        """What of ``data`` passes, and what is swallowed."""
        if self.swallow_after_bytes is None:
            return data, b""
        room = max(0, self.swallow_after_bytes - self.num_bytes)
        return data[:room], data[room:]


class Link:
    """One proxied connection. ``ended`` is set when nothing is left of it."""

    def __init__(self, to_server: Direction, to_client: Direction) -> None:
        self.to_server = to_server
        self.to_client = to_client
        self.ended = asyncio.Event()
        self._cut = asyncio.Event()

    def swallow(self) -> None:
        """Goes half open both ways: to each side the other one falls silent."""
        self.to_server.swallow()
        self.to_client.swallow()

    def cut(self) -> None:
        """Resets both sides."""
        self._cut.set()

    async def run(self, client: socket.socket, server: socket.socket) -> None:
        """Carries bytes until both directions have ended or the link is cut; closes both."""
        flows = asyncio.gather(
            self._flow(client, server, self.to_server), self._flow(server, client, self.to_client)
        )
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            watched: set[asyncio.Future[Any]] = {flows, cut}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _stop(flows, cut)
            for end in (client, server):
                if self._cut.is_set():
                    _reset_on_close(end)
                end.close()
            self.ended.set()

    async def _flow(self, source: socket.socket, sink: socket.socket, way: Direction) -> None:
        """One direction up to its end; where a side breaks, the other is told unless half open."""
        pieces: asyncio.Queue[Piece] = asyncio.Queue(MAX_PIECES)
        work = (
            asyncio.ensure_future(_read(source, pieces, way)),
            asyncio.ensure_future(self._send(pieces, sink, way)),
        )
        try:
            await asyncio.gather(*work)
        except OSError:
            if way.swallow_after_bytes is not None:
                await asyncio.Event().wait()
            self.cut()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _send(
        self, pieces: asyncio.Queue[Piece], sink: socket.socket, way: Direction
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await pieces.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                if way.swallow_after_bytes is None:
                    sink.shutdown(socket.SHUT_WR)
                    return
                await asyncio.Event().wait()  # an end that is swallowed too
            passing, swallowed = way.split(data)
            way.swallowed += swallowed
            way.num_bytes += len(passing)
            await loop.sock_sendall(sink, passing)


class FaultProxy:
    """Forwards ``port`` of the loopback to ``upstream_port``; open it with `proxied`.

    ``to_server`` and ``to_client`` are what a new link starts with; ``links`` are
    all that were made, in order.
    """

    def __init__(self, upstream_port: int) -> None:
        self.to_server = Direction()
        self.to_client = Direction()
        self.links: list[Link] = []
        self._upstream = (LOCAL, upstream_port)
        self._listener = socket.create_server((LOCAL, 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    async def run(self) -> None:
        """Takes connections until it is cancelled; ends with all of them closed."""
        loop = asyncio.get_running_loop()
        runs: set[asyncio.Task[None]] = set()
        try:
            while True:
                client, _ = await loop.sock_accept(self._listener)
                link = Link(replace(self.to_server), replace(self.to_client))
                self.links.append(link)
                runs.add(asyncio.create_task(self._carry(link, client)))
        finally:
            self._listener.close()
            await _stop(*runs)

    async def _carry(self, link: Link, client: socket.socket) -> None:
        server = socket.socket()
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(server, self._upstream)
        except OSError:  # the server is down: the client sees it as it would without the proxy
            _reset_on_close(client)
            client.close()
            server.close()
            link.ended.set()
            return
        await link.run(client, server)


@asynccontextmanager
async def proxied(upstream_port: int) -> AsyncIterator[FaultProxy]:
    """A proxy before ``upstream_port`` for as long as the block runs."""
    proxy = FaultProxy(upstream_port)
    run = asyncio.create_task(proxy.run())
    try:
        yield proxy
    finally:
        await _stop(run)


async def _read(source: socket.socket, pieces: asyncio.Queue[Piece], way: Direction) -> None:
    """Stamps each piece with when it is due; an empty one is the end."""
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(source, READ_BYTES)
        await pieces.put((loop.time() + way.delay_s, data))
        if not data:
            return


async def _stop(*futures: asyncio.Future[Any]) -> None:
    for future in futures:
        future.cancel()
    for outcome in await asyncio.gather(*futures, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


def _reset_on_close(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
