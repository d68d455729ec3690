"""The proxy makes each fault as it is told, and the processes start, die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.reliability.proxy import FaultProxy, proxied
from tests.reliability.servers import EVERSTREAM, FAKE, ServerProcess


@asynccontextmanager
async def echo() -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that sends back what it gets; its port and what it got, b"" for an end.

    Its clients have gone by the end of the block.
    """
    got: list[bytes] = []
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            while data := await reader.read(1 << 16):
                got.append(data)
                writer.write(data)
            got.append(b"")
        except ConnectionError:
            got.append(b"reset")
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], got
        await asyncio.gather(*serving)


@asynccontextmanager
async def echo_through_proxy() -> AsyncIterator[tuple[FaultProxy, list[bytes]]]:
    async with echo() as (port, got), proxied(port) as proxy:
        yield proxy, got


async def test_proxy_without_faults_changes_nothing() -> None:
    async with echo_through_proxy() as (proxy, got):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        data = random.Random(0).randbytes(1_000_000)
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == data
        assert got[-1] == b""
        await proxy.links[0].ended.wait()
        assert proxy.links[0].to_server.num_bytes == len(data)
        writer.close()


async def test_proxy_cuts_at_the_byte() -> None:
    async with echo_through_proxy() as (proxy, _):
        proxy.to_server.cut_after_bytes = 10
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"x" * 25)
        with pytest.raises(ConnectionResetError):
            await reader.read(-1)
        await proxy.links[0].ended.wait()
        assert proxy.links[0].to_server.num_bytes == 10
        writer.close()


async def test_half_open_proxy_swallows_bytes_and_eof() -> None:
    async with echo_through_proxy() as (proxy, got):
        proxy.to_server.swallow_after_bytes = 3
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"abcdef")
        assert await reader.readexactly(3) == b"abc"
        writer.write_eof()
        writer.close()
        await visit(proxy)
        assert got == [b"abc", b"!", b""]
        assert proxy.links[0].to_server.swallowed == b"def"
        assert not proxy.links[0].ended.is_set()


async def test_live_link_can_go_half_open() -> None:
    async with echo_through_proxy() as (proxy, got):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        proxy.links[0].swallow()
        writer.write(b"b")
        await visit(proxy)
        assert got == [b"a", b"!", b""]
        writer.close()


async def visit(proxy: FaultProxy) -> None:
    """Another connection is opened and closed: what was to arrive before it has."""
    proxy.to_server.swallow_after_bytes = None
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(b"!")
    writer.write_eof()
    assert await reader.read() == b"!"
    writer.close()


async def test_trickle_passes_everything_in_small_pieces() -> None:
    async with echo_through_proxy() as (proxy, got):
        proxy.to_server.piece_bytes = 2
        proxy.to_server.gap_s = 0.002
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"abcdefgh")
        assert await reader.readexactly(8) == b"abcdefgh"
        assert b"".join(got) == b"abcdefgh"
        assert len(got) > 1
        writer.close()


async def test_delay_holds_bytes_back_in_order() -> None:
    async with echo_through_proxy() as (proxy, _):
        proxy.to_client.delay_s = 0.05
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        begun = loop.time()
        for piece in (b"a", b"b", b"c"):
            writer.write(piece)
        assert await reader.readexactly(3) == b"abc"
        assert loop.time() - begun >= 0.05
        writer.close()


async def test_proxy_before_nothing_resets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with proxied(port) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.close()


def test_server_process_can_be_killed_and_started_again_on_its_port() -> None:
    with ServerProcess(program=FAKE) as server:
        port, pid = server.port, server.pid
        server.kill()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        server.restart()
        assert server.port == port
        assert server.pid != pid
        assert server.get("/health") == (200, '{"status":"ok"}')
        assert server.resident_bytes() > 1 << 20
        assert server.num_descriptors() > 3
        assert server.gauges()["everstream_slots", "held"] == 0
        assert server.stop() == 0


def test_paused_server_answers_after_it_continues() -> None:
    with ServerProcess(program=FAKE) as server:
        server.pause()
        with pytest.raises(TimeoutError):
            server.get("/health", timeout_s=0.2)
        server.go_on()
        assert server.get("/health")[0] == 200


def test_server_that_does_not_start_reports_the_reason() -> None:
    server = ServerProcess("--model", "/nowhere", program=EVERSTREAM)
    with pytest.raises(AssertionError, match="nowhere"):
        server.__enter__()
