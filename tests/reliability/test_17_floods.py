"""17: floods of tiny frames cost bounded memory and a bounded part of the others' time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from benchmarks.websocket import BINARY, CONTINUATION, PING, PONG, TEXT, frame, text
from server.http.protocols import MAX_FRAGMENTS
from tests.reliability.bystander import Bystander, bystander
from tests.reliability.raw_websocket import RawWebSocket, connected, opened
from tests.reliability.servers import FAKE, ServerProcess
from tests.server.harness import running

#: What the allocator keeps of queues that were full once, however long the flood. How full they
#: get at first is chance, so floods come before the first look: measured, it grew by up to 53 MiB
#: in the second round and by up to 30 MiB in one of the later rounds, to the same total.
SLACK_BYTES = 48 << 20
NUM_ROUNDS_BEFORE = 4
PIECE = 1000
FLOODS = (
    frame(PING) * PIECE,
    frame(PONG, b"x" * 125) * PIECE,
    frame(CONTINUATION, fin=False) * PIECE,
    frame(CONTINUATION, b" ", fin=False) * PIECE,
    frame(TEXT) * PIECE,
    frame(BINARY, b"x") * PIECE,
    text({"type": "cancel", "request_id": "x"}) * PIECE,
)


async def flood(client: RawWebSocket, data: bytes) -> None:
    """Sends ``data`` again and again, until the server has had enough."""
    with contextlib.suppress(OSError):
        while True:
            await client.send(data)


@pytest.mark.timeout(600)
async def test_floods_cost_no_memory_and_disturb_no_client(long: bool) -> None:
    with ServerProcess(program=FAKE) as server:
        async with bystander(server.port) as other:
            for _ in range(NUM_ROUNDS_BEFORE):
                await all_floods(server, other, 10)
            resident_bytes = server.resident_bytes()
            await all_floods(server, other, 1000 if long else 20)
            assert server.resident_bytes() - resident_bytes < SLACK_BYTES
            assert server.gauges()["everstream_slots", "held"] == 1


async def all_floods(server: ServerProcess, other: Bystander, num_tokens: int) -> None:
    for data in FLOODS:
        for room_bytes in (4096, None):
            async with opened(server.port, room_bytes) as client:
                if data[0] & 0x0F == CONTINUATION:
                    await client.send(frame(TEXT, fin=False))
                await flood_beside(client, data, other, num_tokens)
    async with connected(server.port) as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
        await client.send(b"transfer-encoding: chunked\r\n\r\n")
        await flood_beside(client, b"1\r\n \r\n" * PIECE, other, num_tokens)


async def flood_beside(
    client: RawWebSocket, data: bytes, other: Bystander, num_tokens: int
) -> None:
    """A flood for as long as the bystander needs for its tokens, which it gets."""
    work = asyncio.create_task(flood(client, data))
    await other.more(num_tokens)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_every_ping_of_a_client_that_reads_is_answered() -> None:
    async with running() as server, opened(server.port) as client:
        for start in range(0, 2000, 100):
            numbers = [str(number).encode() for number in range(start, start + 100)]
            await client.send(b"".join(frame(PING, number) for number in numbers))
            for number in numbers:
                answer = await client.receive()
                assert (answer.opcode, answer.payload) == (PONG, number)


async def test_endless_empty_fragments_close_with_1008() -> None:
    async with running() as server, opened(server.port) as client:
        await client.send(frame(TEXT, b"{", fin=False))
        await client.send(frame(CONTINUATION, fin=False) * (MAX_FRAGMENTS + 1))
        assert await client.close_code() == 1008


async def test_message_of_many_small_fragments_is_taken() -> None:
    message = b'{"type": "create", "request_id": "a"}'
    pieces = [message[i : i + 1] for i in range(1, len(message))] + [b""] * 2000
    async with running() as server, opened(server.port) as client:
        for _ in range(3):  # the count is that of one message
            await client.send(frame(TEXT, message[:1], fin=False))
            await client.send(b"".join(frame(CONTINUATION, piece, fin=False) for piece in pieces))
            await client.send(frame(CONTINUATION))
            assert (await client.receive_json())["type"] == "created"


async def test_pings_between_fragments_are_answered_before_the_message_ends() -> None:
    async with running() as server, opened(server.port) as client:
        await client.send(frame(TEXT, b'{"type": "create", ', fin=False) + frame(PING, b"now"))
        answer = await client.receive()
        assert (answer.opcode, answer.payload) == (PONG, b"now")
        await client.send(frame(CONTINUATION, b'"request_id": "a"}'))
        assert (await client.receive_json())["type"] == "created"
