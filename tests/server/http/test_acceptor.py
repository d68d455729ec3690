from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from contextlib import suppress
from typing import Self

import pytest

from server.api.connections import SPARE, ConnectionTable
from server.http.protocols import CountedProtocol
from server.http.server import Acceptor


class Listener(socket.socket):
    """A listener whose next accepts fail with ``errors``."""

    def __init__(self, *errors: int) -> None:
        super().__init__()
        self.bind(("127.0.0.1", 0))
        self.listen()
        self.errors = list(errors)

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.errors:
            code = self.errors.pop(0)
            raise OSError(code, os.strerror(code))
        return super().accept()


class Protocol(CountedProtocol, asyncio.Protocol):
    """Says ``hello`` as soon as it is connected."""

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"hello")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set_result(None)


class Client:
    """Connects to an acceptor of ``listener``; at the end of its block everything is closed."""

    def __init__(self, listener: Listener, table: ConnectionTable) -> None:
        self._listener, self._table = listener, table
        self._accepted: list[Protocol] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._acceptor = Acceptor(self._listener, self._table, self._protocol, pause_s=0.01)
        return self

    async def __aexit__(self, *error: object) -> None:
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        await asyncio.gather(*(protocol.ended for protocol in self._accepted))
        self._acceptor.close()

    def _protocol(self) -> Protocol:
        self._accepted.append(Protocol())
        return self._accepted[-1]

    async def connect(self) -> asyncio.StreamReader:
        """A connection that was greeted."""
        reader, writer = await asyncio.open_connection(*self._listener.getsockname())
        self._writers.append(writer)
        assert await reader.readexactly(5) == b"hello"
        return reader


async def test_accept_continues_after_descriptors_ran_out(caplog: pytest.LogCaptureFixture) -> None:
    with Listener(errno.EMFILE, errno.ENOBUFS) as listener, caplog.at_level(logging.WARNING):
        async with Client(listener, ConnectionTable(4)) as client:
            await client.connect()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "accepting of connections paused: Too many open files" in caplog.text


async def test_idle_connection_is_closed_where_descriptors_ran_out() -> None:
    with Listener() as listener:
        async with Client(listener, ConnectionTable(4)) as client:
            first = await client.connect()
            listener.errors = [errno.EMFILE]
            await client.connect()
            assert await first.read() == b""


async def test_aborted_connection_does_not_stop_the_acceptor() -> None:
    with Listener(errno.ECONNABORTED, errno.EPROTO) as listener:
        async with Client(listener, ConnectionTable(4)) as client:
            await client.connect()


async def test_no_more_are_open_than_the_table_allows() -> None:
    table = ConnectionTable(4)
    with Listener() as listener:
        async with Client(listener, table) as client:
            for _ in range(3 * SPARE):
                await client.connect()
                assert table.num_open <= 4 + SPARE
