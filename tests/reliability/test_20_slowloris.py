"""20: clients that begin something and never end it are closed in ten seconds, of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from benchmarks.websocket import handshake
from server.api.gate import BODY_TIMEOUT_S
from server.http.protocols import LINGER_S, HttpProtocol, WebSocketProtocol
from server.http.server import TCP_USER_TIMEOUT_MS
from tests.reliability.bystander import bystander
from tests.reliability.raw_websocket import RawWebSocket, connected
from tests.reliability.servers import FAKE, STUCK_S, ServerProcess
from tests.waiting import eventually

CRITERION_S = 10.0
DRIP_S = 0.2

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
FONT = b"GET /static/fonts/newsreader.woff2 HTTP/1.1\r\nhost: localhost\r\n\r\n"


def begins(sent: bytes) -> Callable[[RawWebSocket], Awaitable[None]]:
    """Says so much and falls silent."""

    async def client(connection: RawWebSocket) -> None:
        await connection.send(sent)
        await connection.ended()

    return client


def drips(begun: bytes, drop: bytes) -> Callable[[RawWebSocket], Awaitable[None]]:
    """Says a little more again and again."""

    async def client(connection: RawWebSocket) -> None:
        await connection.send(begun)
        ended = asyncio.ensure_future(connection.ended())
        while not ended.done():
            await asyncio.wait([ended], timeout=DRIP_S)
            try:
                await connection.send(drop)
            except OSError:
                break
        await ended

    return client


async def never_takes_its_answers(connection: RawWebSocket) -> None:
    """Asks for a megabyte and does not read; that it is closed shows in the server only."""
    await connection.send(FONT * 20)


KINDS = {
    "says nothing": begins(b""),
    "half a head": begins(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: "),
    "half a second head": begins(GET + b"GET /hea"),
    "dripping head": drips(b"GET /health HTTP/1.1\r\n", b"x: y\r\n"),
    "dripping request line": drips(b"GET /", b"a"),
    "dripping handshake": drips(handshake()[:-2], b"x: y\r\n"),
    "empty lines first": drips(b"\r\n", b"\r\n"),
    "no body": begins(POST + b"content-length: 100\r\n\r\n"),
    "dripping body": drips(POST + b"content-length: 1000000\r\n\r\n", b" "),
    "dripping chunks": drips(POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "dripping chunk": drips(POST + b"transfer-encoding: chunked\r\n\r\nfff\r\n", b" "),
    "rest of a refused body": drips(POST + b"content-length: 99999999\r\n\r\n", b" "),
    "after an error": drips(b"nonsense\r\n\r\n", b"x"),
    "handshake with a body": begins(
        handshake()[:-2] + b"content-length: 10\r\ntransfer-encoding: chunked\r\n\r\n"
    ),
    "handshake of many headers": begins(handshake()[:-2] + b"x: y\r\n" * 200 + b"\r\n"),
    "handshake of a long header": begins(handshake()[:-2] + b"x: " + b"y" * 9000 + b"\r\n\r\n"),
    "kept alive": begins(GET),
}


def test_deadlines_meet_the_criterion() -> None:
    assert HttpProtocol.head_timeout_s <= CRITERION_S
    assert BODY_TIMEOUT_S <= CRITERION_S
    assert HttpProtocol.stall_timeout_s == TCP_USER_TIMEOUT_MS / 1000  # of one that does not read
    assert LINGER_S <= CRITERION_S
    assert WebSocketProtocol.close_timeout_s <= CRITERION_S


async def test_slow_clients_of_every_kind_are_closed() -> None:
    """All at once, so that it takes as long as the slowest; other clients need not wait."""
    # The kernel drops the one that does not read as soon as the others are dropped.
    with ServerProcess("--user-timeout-ms", int(CRITERION_S * 1000), program=FAKE) as server:
        num_descriptors = server.num_descriptors()
        async with bystander(server.port) as other, connected(server.port, 4096) as deaf:
            await never_takes_its_answers(deaf)
            still_there = set(KINDS)

            async def visit(name: str) -> None:
                async with connected(server.port) as connection:
                    await KINDS[name](connection)
                still_there.discard(name)

            visits = [asyncio.create_task(visit(name)) for name in KINDS]
            await asyncio.wait(visits, timeout=STUCK_S)
            assert not still_there
            await asyncio.gather(*visits)
            await other.more()
            await eventually(lambda: server.num_descriptors() <= num_descriptors + 1)
