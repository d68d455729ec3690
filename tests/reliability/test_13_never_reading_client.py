"""13: a client that never reads is closed in time; nothing of it stays, and no other notices."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from benchmarks.websocket import handshake, text
from tests.reliability.bystander import bystander
from tests.reliability.raw_websocket import connected, opened
from tests.reliability.servers import FAKE, ServerProcess
from tests.server.harness import running
from tests.waiting import eventually

ENDLESS = {"prompt": "hi", "max_tokens": 1_000_000}
BODY = json.dumps({**ENDLESS, "stream": True}).encode()
STREAM = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
ROOM_BYTES = 4096
#: What Python's allocator may keep of a round.
SLACK_BYTES = 4 << 20


@pytest.mark.timeout(600)
async def test_never_reading_clients_are_dropped_and_leave_nothing_behind(long: bool) -> None:
    num_deaf = 100 if long else 10
    flags = () if long else ("--user-timeout-ms", 1000)
    environment = {"EVERSTREAM_MAX_SESSIONS": "512", "EVERSTREAM_MAX_QUEUED_EVENTS": "256"}
    with ServerProcess("--step-ms", 2, *flags, program=FAKE, environment=environment) as server:
        async with bystander(server.port) as other:
            num_descriptors = await asyncio.to_thread(server.num_descriptors)
            await leave_deaf(server, num_deaf, num_descriptors)
            resident_bytes = server.resident_bytes()
            await other.more(100)
            first = len(other.times_s)
            await leave_deaf(server, num_deaf, num_descriptors)
            await other.more(100)
            if long:
                other.report(f"beside {num_deaf} deaf clients", first)
            assert server.resident_bytes() - resident_bytes < SLACK_BYTES
            assert server.gauges()["everstream_slots", "held"] == 1


async def leave_deaf(server: ServerProcess, number: int, num_descriptors: int) -> None:
    """Deaf clients of both kinds begin streams; returns when the server has none of them left.

    They are all still there, and have closed nothing.
    """
    num_begun = begun(server)
    async with AsyncExitStack() as stack:
        for _ in range(number // 2):
            client = await stack.enter_async_context(opened(server.port, ROOM_BYTES))
            await client.send(text({"type": "generate", "request_id": "a", **ENDLESS}))
            plain = await stack.enter_async_context(connected(server.port, ROOM_BYTES))
            await plain.send(STREAM)
        # Of all, as the first ones may have been dropped before the last ones have begun.
        await eventually(lambda: begun(server) - num_begun == 2 * (number // 2))
        await eventually(lambda: server.num_descriptors() <= num_descriptors)


def begun(server: ServerProcess) -> float:
    """How many streams have had a token."""
    return server.gauges()["everstream_ttft_seconds_count",]


async def test_client_that_asks_for_nothing_and_never_reads_is_dropped_by_its_silence() -> None:
    """It takes no data, so that only the ping it does not answer tells."""
    async with (
        running(heartbeat_s=0.2, ping_timeout_s=0.2) as server,
        connected(server.port, ROOM_BYTES) as client,
    ):
        await client.send(handshake())
        await server.until_disconnected()
