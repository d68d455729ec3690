"""Accepts connections up to the bounds, and stops while the process has no descriptor left.

asyncio accepts whatever comes: where descriptors run out, the store cannot open its
files any more, and each failed accept is a line of the log.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from server.api.middleware.connections import ConnectionTable, OpenConnection
from server.http.connection import CountedProtocol

logger = logging.getLogger("everstream.connections")

#: In one turn of the event loop.
MAX_ACCEPTS = 16
#: How long nothing is accepted after the system had no descriptor or no memory for it.
PAUSE_S = 1.0

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Takes connections from ``listener`` while ``table`` has room, each with a new protocol.

    What is not accepted waits in the kernel. Belongs to one event loop; `close` leaves
    the listener open.
    """

    def __init__(
        self,
        listener: socket.socket,
        table: ConnectionTable,
        make_protocol: Callable[[], CountedProtocol],
        pause_s: float = PAUSE_S,
    ) -> None:
        self._listener, self._table = listener, table
        self._make_protocol, self._pause_s = make_protocol, pause_s
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._start()

    def close(self) -> None:
        """Accepts nothing more."""
        self._loop.remove_reader(self._listener)
        if self._paused is not None:
            self._paused.cancel()

    def _start(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            if not self._table.has_room:  # in the next turn there is, and this is called again
                self._table.close_longest_idle()
                logger.warning("connection limit reached: closing idle connections")
                return
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # else that one connection is gone already
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
            else:
                self._begin(accepted, self._table.address_of_peer(address[0]))

    def _pause(self, error: OSError) -> None:
        """Others of this process need what is left more, and what an idle connection has."""
        logger.warning("accepting of connections paused: %s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._table.close_longest_idle()
        self._paused = self._loop.call_later(self._pause_s, self._start)

    def _begin(self, accepted: socket.socket, address: str) -> None:
        connection = self._table.add(address)
        if connection is None:
            accepted.close()
            return
        accepted.setblocking(False)
        task = self._loop.create_task(self._connect(accepted, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, accepted: socket.socket, connection: OpenConnection) -> None:
        def make_protocol() -> CountedProtocol:
            protocol = self._make_protocol()
            protocol.connection = connection
            return protocol

        try:
            await self._loop.connect_accepted_socket(make_protocol, accepted)
        except OSError as error:
            logger.warning("a connection could not be set up: %s", error.strerror)
            connection.lost()
            accepted.close()
