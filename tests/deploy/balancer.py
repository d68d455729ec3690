"""A balancer for TCP, as small as one can be: it knows nothing of HTTP, sessions or health."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.reliability.proxy import LOCAL, Direction, Link


class Balancer:
    """Gives each connection to the next of ``upstreams`` that takes it; open it with `balanced`.

    ``upstreams`` are ports of the loopback, and may be changed at any time.
    ``num_connections`` counts those that were given to one.
    """

    def __init__(self) -> None:
        self.upstreams: list[int] = []
        self.num_connections = 0
        self._next = 0
        self._listener = socket.create_server((LOCAL, 0))
        self._listener.setblocking(False)
        self.url = f"http://{LOCAL}:{self._listener.getsockname()[1]}"

    async def run(self) -> None:
        """Takes connections until it is cancelled; ends with all of them closed."""
        loop = asyncio.get_running_loop()
        with self._listener:
            async with asyncio.TaskGroup() as links:
                while True:
                    client, _ = await loop.sock_accept(self._listener)
                    links.create_task(self._carry(client))

    async def _carry(self, client: socket.socket) -> None:
        with client, socket.socket() as upstream:
            for end in (client, upstream):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if await self._connect(upstream):
                self.num_connections += 1
                await Link(Direction(), Direction()).run(client, upstream)

    async def _connect(self, upstream: socket.socket) -> bool:
        """Whether one of them is there: each is tried once."""
        loop = asyncio.get_running_loop()
        self._next += 1
        turn = self._next % max(1, len(self.upstreams))
        for port in self.upstreams[turn:] + self.upstreams[:turn]:
            try:
                await loop.sock_connect(upstream, (LOCAL, port))
            except OSError:  # it has ended: the next one, please
                continue
            return True
        return False


@asynccontextmanager
async def balanced() -> AsyncIterator[Balancer]:
    """A balancer for as long as the block runs."""
    balancer = Balancer()
    run = asyncio.create_task(balancer.run())
    try:
        yield balancer
    finally:
        run.cancel()
        await asyncio.wait([run])
