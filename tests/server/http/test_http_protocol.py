"""Peers that do not play along, on real sockets: none may hold a connection."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time

import pytest

from server.http.http_protocol import HttpProtocol
from tests.fakes import FakeEngine
from tests.server.harness import Running, running

HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)
ENDLESS = {"prompt": "hi", "max_tokens": 1_000_000}


class Impatient(HttpProtocol):
    head_timeout_s = 0.1


class ImpatientForHeads(Impatient):
    def timeout_keep_alive_handler(self) -> None:
        """Only the deadline of a head ends a connection: a test may wait for it for long."""


def post(body: bytes, more: str = "") -> bytes:
    return (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"content-length: {len(body)}\r\n{more}\r\n"
    ).encode() + body


def frame(opcode: int, payload: bytes) -> bytes:
    """A masked frame, the mask being zero."""
    size = len(payload)
    head = bytes((0x80 | opcode, 0x80 | (min(126, size))))
    return head + (struct.pack("!H", size) if size >= 126 else b"") + bytes(4) + payload


def unchunked(answer: bytes) -> bytes:
    """The body of a whole chunked answer."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        num_bytes = int(size, 16)
        assert rest[num_bytes : num_bytes + 2] == b"\r\n"
        body, rest = body + rest[:num_bytes], rest[num_bytes + 2 :]
    return body


async def deaf_client(server: Running, sent: bytes, room_bytes: int = 4096) -> socket.socket:
    """A connected socket with ``room_bytes`` for what it does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", server.port))
    await loop.sock_sendall(client, sent)
    async with asyncio.timeout(60):
        while not server.server.server_state.connections:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
    return client


async def deaf_websocket(server: Running, room_bytes: int = 4096) -> socket.socket:
    client = await deaf_client(server, HANDSHAKE, room_bytes)
    assert b" 101 " in await asyncio.get_running_loop().sock_recv(client, 1000)
    return client


async def talk(server: Running, frames: bytes) -> bytes:
    """All that the server sends on a WebSocket after ``frames``, up to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HANDSHAKE)
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    writer.write(frames)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: ",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea",
    ],
    ids=["nothing", "half a head", "half a second head"],
)
async def test_slow_head_is_cut_off(sent: bytes) -> None:
    async with running(http_protocol=ImpatientForHeads) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        async with asyncio.timeout(60):
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(1 << 20)
        writer.close()


async def test_dripping_head_is_cut_off() -> None:
    async with running(http_protocol=Impatient) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\n")
        ended = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(60):
            while not ended.done():
                writer.write(b"x: y\r\n")
                await asyncio.wait([ended], timeout=0.02)
        assert isinstance(ended.exception(), ConnectionResetError) or ended.result() == b""
        writer.close()


async def test_slow_request_is_not_cut_off_while_it_is_answered() -> None:
    async with running(
        FakeEngine(before_step=lambda: time.sleep(0.05)), http_protocol=Impatient
    ) as server:
        response = await server.generate(prompt="hi", max_tokens=10)
        assert response.json()["usage"]["completion_tokens"] == 10


async def test_rest_of_a_refused_body_is_not_awaited_for_ever(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n{"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head)
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    async with asyncio.timeout(60):
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1 << 20)
    writer.close()


async def test_socket_that_never_reads_is_dropped_and_its_slot_freed() -> None:
    async with running(user_timeout_ms=500, ping_interval_s=0.2) as server:
        client = await deaf_websocket(server)
        message = {"type": "generate", "request_id": "a", **ENDLESS}
        client.send(frame(1, json.dumps(message).encode()))
        await server.until_disconnected()
        await server.until_slots_are_free()
        client.close()


async def test_sse_client_that_never_reads_is_dropped_and_its_slot_freed() -> None:
    async with running(user_timeout_ms=500, max_queued_events=256) as server:
        client = await deaf_client(server, post(json.dumps({**ENDLESS, "stream": True}).encode()))
        await server.until_disconnected()
        await server.until_slots_are_free()
        client.close()


async def test_reader_that_pauses_for_long_gets_everything_in_order() -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 5000, "stream": True}).encode()
    async with running(max_queued_events=1 << 20) as server:
        client = await deaf_client(server, post(body, "connection: close\r\n"))
        received = await asyncio.get_running_loop().sock_recv(client, 1)  # it has begun
        await asyncio.wait_for(server.async_engine.drained(), 20)
        while part := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
            received += part
        client.close()
    positions = [int(found) for found in re.findall(rb'"position":(\d+)}', unchunked(received))]
    assert positions == [*range(2, 5002), 5002]


async def test_socket_whose_peer_pauses_for_long_gets_everything_in_order() -> None:
    message = {"type": "generate", "request_id": "a", "prompt": "hi", "max_tokens": 5000}
    async with running(max_queued_events=1 << 20) as server:
        client = await deaf_websocket(server)
        client.send(frame(1, json.dumps(message).encode()))
        received = await asyncio.get_running_loop().sock_recv(client, 1)  # it has begun
        await asyncio.wait_for(server.async_engine.drained(), 20)
        while b'"finished"' not in received[-1000:]:
            received += await asyncio.get_running_loop().sock_recv(client, 1 << 16)
        client.close()
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


async def test_peer_that_never_answers_pings_is_dropped() -> None:
    async with running(ping_interval_s=0.1) as server:
        assert (await talk(server, b"")).startswith(b"\x89\x04")
        await server.until_disconnected()


async def test_ping_flood_of_a_peer_that_never_reads_is_cut_off(server: Running) -> None:
    client = await deaf_websocket(server)
    pings = frame(9, b"x" * 125) * 1000
    flood = asyncio.get_running_loop().sock_sendall(client, pings * 1000)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        await asyncio.wait_for(flood, 20)
    client.close()


async def test_gigabyte_frame_is_refused_by_its_header(server: Running) -> None:
    answer = await talk(server, b"\x81\xff" + struct.pack("!Q", 1 << 30) + bytes(4))
    assert struct.pack("!H", 1009) in answer


async def test_text_that_is_no_utf8_closes_with_1007(server: Running) -> None:
    assert struct.pack("!H", 1007) in await talk(server, frame(1, b"\xff\xfe"))


async def test_fragments_with_pings_between_them_make_one_message(server: Running) -> None:
    first, *rest = b'{"type": "create", "request_id": "a"}'
    pieces = [bytes((0x01, 0x81, *bytes(4), first))]
    for byte in rest:
        pieces += [frame(9, b""), bytes((0x00, 0x81, *bytes(4), byte))]
    close = frame(8, struct.pack("!H", 1000))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HANDSHAKE)
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"".join(pieces) + frame(0x80, b""))
    await asyncio.wait_for(reader.readuntil(b'{"type":"created","request_id":"a"'), 10)
    writer.write(close)
    await asyncio.wait_for(reader.read(), 10)
    writer.close()


async def test_kept_alive_connection_is_closed_after_the_time_that_is_set() -> None:
    """By the server, with an orderly end; the default leaves it open meanwhile."""
    async with running(keep_alive_s=0.05) as server, running() as patient:
        reader, writer = await asyncio.open_connection("127.0.0.1", patient.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await server.exchange(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert len(patient.server.server_state.connections) == 1
        assert not reader.at_eof()
        writer.close()
        await writer.wait_closed()
