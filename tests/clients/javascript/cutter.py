"""A proxy that resets a WebSocket after some of the server's frames.

A path ``/cut/first/K/NAME/...`` resets the first connection under this path after
K frames, with half of the next one under way, and lets the later ones live;
``/cut/each/K/NAME/...`` resets every one. The server sees what follows. All other
requests pass as they are.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOCAL = "127.0.0.1"
CUT_PATH = re.compile(rb"^GET (/cut/(first|each)/(\d+)/\w+)(/\S*)", re.DOTALL)


class CuttingProxy:
    """Forwards ``port`` of the loopback to ``upstream_port``; open it with `cutting`."""

    def __init__(self, upstream_port: int) -> None:
        self.port = 0
        self._upstream_port = upstream_port
        self._cut: set[bytes] = set()

    async def serve(self, begun: threading.Event, ends: asyncio.Event) -> None:
        """Takes connections until it ``ends``, then resets those that are left."""
        server = await asyncio.start_server(self._carry, LOCAL, 0)
        self.port = server.sockets[0].getsockname()[1]
        begun.set()
        await ends.wait()
        server.close()
        carrying = asyncio.all_tasks() - {asyncio.current_task()}
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)

    async def _carry(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        try:
            head = await client.readuntil(b"\r\n\r\n")
            head, num_frames = self._plan(head)
            server, upstream = await asyncio.open_connection(LOCAL, self._upstream_port)
            upstream.write(head)
            up = asyncio.create_task(_copy(client, upstream))
            down = asyncio.create_task(_copy_frames(server, answer, num_frames))
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            answer.transport.abort()
            if upstream is not None:
                upstream.transport.abort()

    def _plan(self, head: bytes) -> tuple[bytes, int | None]:
        """The request as the server is to see it, and after how many frames it is cut."""
        found = CUT_PATH.match(head)
        if found is None:
            return head, None
        name, how, num_frames, path = found.groups()
        head = b"GET " + path + head[found.end() :]
        if how == b"first" and name in self._cut:
            return head, None
        self._cut.add(name)
        return head, int(num_frames)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        sink.write(data)
        await sink.drain()


async def _copy_frames(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, num_frames: int | None
) -> None:
    """Copies all, or the handshake and so many data frames, and half of the next one."""
    if num_frames is None:
        await _copy(source, sink)
        return
    sink.write(await source.readuntil(b"\r\n\r\n"))
    while True:
        frame = await _frame(source)
        is_data = frame[0] & 0x0F < 8
        if is_data and num_frames == 0:
            sink.write(frame[: len(frame) // 2])
            await sink.drain()
            await asyncio.sleep(0)
            return
        num_frames -= is_data
        sink.write(frame)
        await sink.drain()


async def _frame(source: asyncio.StreamReader) -> bytes:
    """One whole frame of a server, which masks nothing."""
    head = await source.readexactly(2)
    length = head[1]
    if length >= 126:
        more = await source.readexactly(2 if length == 126 else 8)
        head, length = head + more, int.from_bytes(more, "big")
    return head + await source.readexactly(length)


@contextmanager
def cutting(upstream_port: int) -> Iterator[CuttingProxy]:
    """A proxy before ``upstream_port`` for as long as the block runs."""
    proxy = CuttingProxy(upstream_port)
    begun = threading.Event()
    loop = asyncio.new_event_loop()
    ends = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(proxy.serve(begun, ends)))
    thread.start()
    try:
        assert begun.wait(60)
        yield proxy
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join()
        loop.close()
