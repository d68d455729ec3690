"""Connections that send nothing, and more of them than there are descriptors: others continue.

A real server under a real limit on open files; the clients are this process.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.websocket import handshake
from server.api.connections import SPARE
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.raw_websocket import connected
from tests.reliability.servers import LOCAL, STUCK_S, ServerProcess
from tests.reliability.streams import ENDLESS, KeptStream
from tests.tiny import write_model

MAX_FILES = 128
#: What is left of them for connections: see `server.http.server`.
MAX_OPEN = 64
MAX_ADMITTED = MAX_OPEN - SPARE
MANY = 300
#: Far fewer than connections.
MAX_LOG_LINES = 60


def server_at(folder: Path, **environment: int) -> ServerProcess:
    """A server that may open `MAX_FILES` files, and saves a state every 64 tokens."""
    variables = {"save_interval_tokens": 64, **environment}
    return ServerProcess(
        *("--model", write_model(folder / "model"), "--store", folder / "store"),
        environment={f"EVERSTREAM_{name.upper()}": str(n) for name, n in variables.items()},
        within=("sh", "-c", f'ulimit -n {MAX_FILES}; exec "$@"', "sh"),
    )


class Silent:
    """Connections from ``address`` that send nothing; ``closed`` counts those that have ended."""

    def __init__(self, port: int, address: str) -> None:
        self.closed = 0
        self._port, self._address = port, address
        self._writers: list[asyncio.StreamWriter] = []
        self._reading: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()

    async def open(self, number: int) -> None:
        await asyncio.gather(*(self._open() for _ in range(number)))

    async def _open(self) -> None:
        reader, writer = await asyncio.open_connection(
            LOCAL, self._port, local_addr=(self._address, 0)
        )
        self._writers.append(writer)
        self._reading.append(asyncio.create_task(self._read(reader)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            await reader.read()
        async with self._changed:
            self.closed += 1
            self._changed.notify_all()

    async def at_most(self, num_open: int) -> None:
        """Returns when the server has closed all but so many. Raises `TimeoutError`."""
        wanted = len(self._writers) - num_open
        async with asyncio.timeout(STUCK_S), self._changed:
            await self._changed.wait_for(lambda: self.closed >= wanted)

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._reading)


@asynccontextmanager
async def silent(port: int, number: int, address: str = LOCAL) -> AsyncIterator[Silent]:
    clients = Silent(port, address)
    await clients.open(number)
    try:
        yield clients
    finally:
        await clients.close()


async def status(port: int, path: str, address: str = LOCAL) -> int:
    """The status of a GET on a connection of its own."""
    reader, writer = await asyncio.open_connection(LOCAL, port, local_addr=(address, 0))
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    head = await reader.readline()
    writer.close()
    return int(head.split()[1])


async def test_silent_connections_leave_the_store_its_descriptors(tmp_path: Path) -> None:
    """They are closed as they exceed the bound, not after a deadline; nothing else fails."""
    odometer = Odometer()
    stream = KeptStream(
        "kept", History(), odometer, prompt="a", max_tokens=ENDLESS, ignore_eos=True
    )
    with server_at(tmp_path) as server:
        reading = asyncio.create_task(stream.run(server.stream_url))
        await odometer.reach(10)
        async with silent(server.port, MANY) as clients:
            await clients.at_most(MAX_OPEN)
            assert await asyncio.to_thread(server.num_descriptors) < MAX_FILES - 32
            for path in ("/health", "/ready", "/v1/models"):
                assert await status(server.port, path) == 200
            await odometer.reach(odometer.num_tokens + 3000)  # of the stream that has always run
            await stream.cancel()
            assert await reading == "finished"
        log = server.log()
        assert server.stop() == 0
    assert "Too many open files" not in log
    assert len(log.splitlines()) < MAX_LOG_LINES, log


async def test_one_address_cannot_keep_more_silent_connections_than_its_bound(
    tmp_path: Path,
) -> None:
    with server_at(tmp_path, max_connections_per_address=4) as server:
        async with silent(server.port, 20) as others, silent(server.port, 60, "127.0.0.2") as many:
            await many.at_most(4 + SPARE)
            assert others.closed == 0
            assert await status(server.port, "/v1/models", "127.0.0.2") == 200
            assert await status(server.port, "/v1/models", "127.0.0.3") == 200


async def test_excess_streams_are_refused_and_disturb_no_client(tmp_path: Path) -> None:
    odometer = Odometer()
    stream = KeptStream(
        "kept", History(), odometer, prompt="a", max_tokens=ENDLESS, ignore_eos=True
    )
    with server_at(tmp_path) as server:
        reading = asyncio.create_task(stream.run(server.stream_url))
        await odometer.reach(10)
        answering: list[asyncio.Task[None]] = []
        async with AsyncExitStack() as stack:
            for number in range(MAX_FILES + 72):
                client = await stack.enter_async_context(connected(server.port))
                await client.shake_hands(handshake())
                if number >= MAX_ADMITTED - 1:  # one carries the stream
                    assert await client.close_code() == 1013
                else:  # it stays, however long the others take
                    answering.append(asyncio.create_task(client.answer_pings()))
            assert await status(server.port, "/health") == 200
            await odometer.reach(odometer.num_tokens + 100)  # of the stream that has always run
            assert not reading.done()
            assert not any(task.done() for task in answering)
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
        log = server.log()
        assert server.stop() == 0
        await reading
    assert len(log.splitlines()) < MAX_LOG_LINES, log


@pytest.mark.parametrize(("setting", "fitting"), [(None, 48), (20, 20), (100_000, 48)])
def test_bound_on_connections_fits_the_limit_of_open_files(
    setting: int | None, fitting: int, tmp_path: Path
) -> None:
    environment = {} if setting is None else {"max_connections": setting}
    with server_at(tmp_path, **environment) as server:
        log = server.log()
    assert (f"at most {fitting} connections: {MAX_FILES} open files" in log) == (fitting == 48)


async def test_soft_limit_on_open_files_is_raised(tmp_path: Path) -> None:
    with ServerProcess(
        *("--model", write_model(tmp_path / "model"), "--store", "memory"),
        within=("sh", "-c", 'ulimit -S -n 100; ulimit -H -n 2000; exec "$@"', "sh"),
    ) as server:
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (2000, 2000)
        async with silent(server.port, 200):
            assert json.loads(server.get("/health")[1])
