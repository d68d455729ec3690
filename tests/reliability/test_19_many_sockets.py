"""19: thousands of idle sockets cost what is budgeted and disturb no one; the excess is told so."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest

from benchmarks.websocket import closing, handshake, text
from tests.reliability.bystander import bystander
from tests.reliability.raw_websocket import RawWebSocket, connected, opened
from tests.reliability.servers import FAKE, ServerProcess
from tests.waiting import eventually

#: Python objects, the kernel's part aside.
BUDGET_BYTES_PER_SOCKET = 70 * 1024
AT_ONCE = 100
#: Apart from the sockets: the bystander, and what asks for metrics.
SPARE_CONNECTIONS = 2


@contextmanager
def descriptors(number: int) -> Iterator[None]:
    """This process may open so many files, or the test is skipped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < number:
        pytest.skip(f"at most {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def open_all(port: int, number: int, stack: AsyncExitStack) -> list[RawWebSocket]:
    clients: list[RawWebSocket] = []
    while len(clients) < number:
        batch = min(AT_ONCE, number - len(clients))
        clients += await asyncio.gather(
            *(stack.enter_async_context(opened(port)) for _ in range(batch))
        )
    return clients


@asynccontextmanager
async def idle(port: int, number: int) -> AsyncIterator[None]:
    """So many open sockets that answer pings and do nothing else."""
    async with AsyncExitStack() as stack:
        answering: list[asyncio.Task[None]] = []
        while len(answering) < number:
            clients = await open_all(port, min(AT_ONCE, number - len(answering)), stack)
            answering += [asyncio.create_task(client.answer_pings()) for client in clients]
        try:
            yield
            assert not any(task.done() for task in answering)
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)


@pytest.mark.timeout(600)
async def test_idle_sockets_stay_within_the_budget_and_disturb_no_client(long: bool) -> None:
    number = 9_500 if long else 500
    environment = {"EVERSTREAM_MAX_CONNECTIONS": str(number + SPARE_CONNECTIONS)}
    with (
        descriptors(number + 200),
        ServerProcess(program=FAKE, environment=environment) as server,
    ):
        server.allow_descriptors(number + 200)
        num_descriptors = server.num_descriptors()
        async with bystander(server.port) as other:
            await other.more(100)
            first = len(other.times_s)
            resident_bytes = server.resident_bytes()
            begun_s = time.monotonic()
            async with idle(server.port, number):
                took_s = time.monotonic() - begun_s
                await other.more(100)
                grown = server.resident_bytes() - resident_bytes
                assert (await metrics(server))["everstream_websockets",] == number + 1
                assert grown / number <= BUDGET_BYTES_PER_SOCKET
                if long:
                    print(
                        f"{grown / number / 1024:.0f} KiB a socket, {number / took_s:.0f} a second"
                    )
                    other.report(f"while {number} sockets open", first)
            await eventually(lambda: server.gauges()["everstream_websockets",] == 1)
        await eventually(lambda: server.num_descriptors() <= num_descriptors)


async def metrics(server: ServerProcess) -> dict[tuple[Any, ...], float]:
    """Asked for in a thread: the sockets of this one must continue answering."""
    return await asyncio.to_thread(server.gauges)


async def test_excess_is_refused_until_a_socket_closes() -> None:
    environment = {"EVERSTREAM_MAX_CONNECTIONS": "8"}
    with ServerProcess(program=FAKE, environment=environment) as server:
        async with AsyncExitStack() as stack:
            clients = await open_all(server.port, 8, stack)
            for _ in range(20):
                async with connected(server.port) as client:
                    await client.shake_hands(handshake())
                    assert await client.close_code() == 1013
            async with connected(server.port) as client:
                await client.shake_hands(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert client.status == 503
                assert int(client.headers["retry-after"]) > 0
            assert "too_many_connections" in server.get("/v1/models")[1]
            assert server.get("/health")[0] == 200
            await clients[0].send(closing())
            assert await clients[0].close_code() == 1000
            await eventually(lambda: server.get("/v1/models")[0] == 200)
            await clients[1].send(text({"type": "create", "request_id": "a"}))
            assert (await clients[1].receive_json())["type"] == "created"


@pytest.mark.timeout(600)
async def test_sockets_that_come_and_go_leave_nothing_behind(long: bool) -> None:
    rounds = 50 if long else 5
    with ServerProcess(program=FAKE) as server:
        num_descriptors = server.num_descriptors()
        async with bystander(server.port) as other:
            for _ in range(rounds):
                async with AsyncExitStack() as stack:
                    for client in await open_all(server.port, AT_ONCE, stack):
                        client.abort()
            await other.more()
        await eventually(lambda: server.num_descriptors() <= num_descriptors)
        await eventually(lambda: server.gauges()["everstream_websockets",] == 0)
