"""The proxy makes each fault as it is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.reliability.proxy import FaultProxy, proxied


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
