"""14: a connection whose other end has vanished is found within one ping and its timeout."""

from __future__ import annotations

import asyncio

from benchmarks.websocket import PING, PONG, FrameParser, frame, handshake
from server.http.server import MAX_PING_INTERVAL_S, PING_TIMEOUT_S, TCP_USER_TIMEOUT_MS
from tests.reliability.proxy import proxied
from tests.reliability.raw_websocket import connected, opened
from tests.reliability.servers import STUCK_S
from tests.server.harness import running


async def test_idle_half_open_socket_is_dropped_after_one_unanswered_ping() -> None:
    async with (
        running(heartbeat_s=0.2, ping_timeout_s=0.2) as server,
        proxied(server.port) as proxy,
    ):
        async with opened(proxy.port) as client:
            num_head_bytes = len(client.head + b"\r\n\r\n")
        # From the handshake on, however long that takes: no ping comes before.
        proxy.to_server.swallow_after_bytes = len(handshake())
        proxy.to_client.swallow_after_bytes = num_head_bytes
        async with opened(proxy.port):
            await server.until_disconnected()
        frames = FrameParser(awaits_head=False).feed(proxy.links[1].to_client.swallowed)
        assert [one.opcode for one in frames].count(PING) == 1


async def test_half_open_socket_is_dropped_while_it_streams_and_its_slot_freed() -> None:
    """The network continues taking tokens, so that only the silence tells."""
    async with (
        running(heartbeat_s=0.2, ping_timeout_s=0.2) as server,
        proxied(server.port) as proxy,
        opened(proxy.port) as client,
    ):
        await client.ask(type="generate", request_id="a", prompt="hi", max_tokens=10**6)
        await client.receive_until("token")
        proxy.links[0].swallow()
        await server.until_disconnected()
        async with asyncio.timeout(STUCK_S):
            await server.async_engine.drained()
        await server.until_slots_are_free()


async def test_socket_whose_answers_come_late_is_kept() -> None:
    async with (
        running(heartbeat_s=1.5, ping_timeout_s=1.5) as server,
        proxied(server.port) as proxy,
    ):
        proxy.to_client.delay_s = proxy.to_server.delay_s = 0.05
        async with opened(proxy.port) as client:
            for _ in range(2):
                ping = await client.receive()
                assert ping.opcode == PING
                await client.send(frame(PONG, ping.payload))
            await client.ask(type="create", request_id="a")
            assert (await client.receive_until("created"))[-1]["position"] == 0


def test_defaults_detect_it_within_a_minute() -> None:
    assert MAX_PING_INTERVAL_S + PING_TIMEOUT_S <= 40
    assert TCP_USER_TIMEOUT_MS <= 20_000


async def test_vanished_http_client_is_dropped_between_requests() -> None:
    async with (
        running(keep_alive_s=0.5) as server,
        proxied(server.port) as proxy,
        connected(proxy.port) as client,
    ):
        await client.shake_hands(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        proxy.links[0].swallow()
        await server.until_disconnected()
