"""Peers that do not play along, on real sockets: none may hold a connection."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import ClassVar

import pytest

from benchmarks.websocket import PING, frame, handshake, text
from server.http.protocols import HttpProtocol
from tests.fakes import FakeEngine
from tests.server.harness import Gate, Running, running
from tests.waiting import eventually

#: What the kernel keeps for a client that does not read.
ROOM_BYTES = 4096


class Watched(HttpProtocol):
    """Notes its deadlines in ``deadlines``."""

    deadlines: ClassVar[list[asyncio.TimerHandle]] = []

    def _arm(self, delay_s: float) -> None:
        super()._arm(delay_s)
        assert self._deadline is not None
        self.deadlines.append(self._deadline)


def post(body: bytes, more: str = "") -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"content-length: {len(body)}\r\n{more}\r\n"
    ).encode() + body


def unchunked(answer: bytes) -> bytes:
    """The body of a whole chunked answer."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        num_bytes = int(size, 16)
        assert rest[num_bytes : num_bytes + 2] == b"\r\n"
        body, rest = body + rest[:num_bytes], rest[num_bytes + 2 :]
    return body


async def deaf_client(server: Running, sent: bytes) -> socket.socket:
    """A connected socket with `ROOM_BYTES` for what it does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM_BYTES)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", server.port))
    await loop.sock_sendall(client, sent)
    await eventually(lambda: server.server.server_state.connections)
    return client


async def deaf_websocket(server: Running) -> socket.socket:
    client = await deaf_client(server, handshake())
    assert b" 101 " in await asyncio.get_running_loop().sock_recv(client, 1000)
    return client


async def read_late(server: Running, client: socket.socket, last: bytes) -> bytes:
    """All that comes up to ``last``, read after the server has made it."""
    loop = asyncio.get_running_loop()
    received = await loop.sock_recv(client, 1)  # it has begun
    await asyncio.wait_for(server.async_engine.drained(), 60)
    while last not in received[-1000:]:
        received += await loop.sock_recv(client, 1 << 16)
    client.close()
    return received


async def test_slow_request_is_not_cut_off_while_it_is_answered() -> None:
    """Its head has had a deadline, and its answer has none."""
    gate = Gate()
    Watched.deadlines.clear()
    async with running(FakeEngine(before_step=gate), http_protocol=Watched) as server:
        answer = asyncio.create_task(server.generate(prompt="hi", max_tokens=10))
        await gate.reached()
        assert [deadline.cancelled() for deadline in Watched.deadlines] == [True]
        gate.open()
        assert (await answer).json()["usage"]["completion_tokens"] == 10
        assert [deadline.cancelled() for deadline in Watched.deadlines] == [True]


async def test_reader_that_pauses_for_long_gets_everything_in_order() -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 5000, "stream": True}).encode()
    async with running(max_queued_events=1 << 20) as server:
        client = await deaf_client(server, post(body))
        received = await read_late(server, client, b"\r\n0\r\n\r\n")
    positions = [int(found) for found in re.findall(rb'"position":(\d+)}', unchunked(received))]
    assert positions == [*range(2, 5002), 5002]


async def test_socket_whose_peer_pauses_for_long_gets_everything_in_order() -> None:
    message = {"type": "generate", "request_id": "a", "prompt": "hi", "max_tokens": 5000}
    async with running(max_queued_events=1 << 20) as server:
        client = await deaf_websocket(server)
        client.send(text(message))
        received = await read_late(server, client, b'"finished"')
    numbers = [int(found) for found in re.findall(rb'"seq":(\d+)', received)]
    assert numbers == list(range(5002))  # that of started is 0


async def test_connection_serves_the_next_request_after_a_stream(server: Running) -> None:
    body = b'{"prompt": "hi", "max_tokens": 200, "stream": true}'
    answer = await server.exchange(post(body) + post(body, "connection: close\r\n"))
    start = answer.rindex(b"HTTP/1.1 200 OK")
    for one in (answer[:start], answer[start:]):
        events = unchunked(one)
        assert events.count(b"data: {") == 201
        assert events.endswith(b"data: [DONE]\n\n")


async def test_stream_to_an_old_client_is_not_chunked(server: Running) -> None:
    body = b'{"prompt": "hi", "max_tokens": 20, "stream": true}'
    answer = await server.exchange(post(body).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert events.count(b"data: {") == 21
    assert events.endswith(b"\n\ndata: [DONE]\n\n")


async def test_ping_flood_of_a_peer_that_never_reads_is_cut_off(server: Running) -> None:
    client = await deaf_websocket(server)
    pings = frame(PING, b"x" * 125) * 1000
    flood = asyncio.get_running_loop().sock_sendall(client, pings * 1000)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        await asyncio.wait_for(flood, 60)
    client.close()


async def test_kept_alive_connection_is_closed_after_the_time_that_is_set() -> None:
    """By the server, with an orderly end; a longer time leaves it open meanwhile."""
    async with running(keep_alive_s=0.05) as server, running(keep_alive_s=600) as patient:
        reader, writer = await asyncio.open_connection("127.0.0.1", patient.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await server.exchange(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert len(patient.server.server_state.connections) == 1
        assert not reader.at_eof()
        writer.close()
        await writer.wait_closed()
