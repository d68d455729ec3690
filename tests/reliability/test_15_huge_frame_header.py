"""15: a frame that claims a gigabyte gets 1009 for its header alone; nothing is held for it."""

from __future__ import annotations

import pytest

from benchmarks.websocket import BINARY, CONTINUATION, TEXT, frame
from tests.reliability.bystander import bystander
from tests.reliability.raw_websocket import connected, opened
from tests.reliability.servers import FAKE, ServerProcess
from tests.server.harness import running

MIB = 1 << 20
SLACK_BYTES = 4 * MIB


@pytest.mark.parametrize("opcode", [TEXT, BINARY])
@pytest.mark.parametrize("length", [MIB + 1, 1 << 30, (1 << 63) - 1, (1 << 64) - 1])
async def test_frame_over_the_limit_is_refused_by_its_header(opcode: int, length: int) -> None:
    async with running() as server, opened(server.port) as client:
        await client.send(frame(opcode, length=length))
        assert await client.close_code() == 1009
        assert (await server.stats()).held_slots == 0


async def test_reason_reaches_a_client_that_keeps_sending() -> None:
    async with running() as server, opened(server.port) as client:
        await client.send(frame(TEXT, bytes(8 * MIB), length=1 << 30))
        assert await client.close_code() == 1009


async def test_fragments_are_counted_together() -> None:
    half = bytes(MIB // 2)
    async with running() as server, opened(server.port) as client:
        await client.send(frame(TEXT, half, fin=False))
        await client.send(frame(CONTINUATION, half, fin=False))
        await client.send(frame(CONTINUATION, b"x", fin=False))
        assert await client.close_code() == 1009


async def test_message_of_exactly_the_limit_is_taken() -> None:
    async with running(max_message_bytes=2048) as server, opened(server.port) as client:
        message = b'{"type": "create", "request_id": "a"}'
        await client.send(frame(TEXT, message + b" " * (2048 - len(message))))
        assert (await client.receive_json())["type"] == "created"


async def test_huge_headers_cost_no_memory_and_disturb_no_client() -> None:
    with ServerProcess(program=FAKE) as server:
        async with bystander(server.port) as other:
            resident_bytes = server.resident_bytes()
            for _ in range(50):
                async with opened(server.port) as client:
                    await client.send(frame(TEXT, bytes(1000), length=1 << 30))
                    assert await client.close_code() == 1009
            await other.more()
            assert server.resident_bytes() - resident_bytes < SLACK_BYTES


async def test_http_body_that_claims_a_gigabyte_is_refused_by_its_header() -> None:
    async with running() as server, connected(server.port) as client:
        await client.shake_hands(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: 1073741824\r\n\r\n"
        )
        assert client.status == 413
