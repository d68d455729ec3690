"""A client that stops reading holds up no other, costs nothing, and misses nothing."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from websockets.asyncio.client import connect

from benchmarks import sse
from tests.fakes import FakeEngine
from tests.reliability.servers import STUCK_S
from tests.server.api.talk import kept, settled, sse_of, story, until
from tests.server.harness import Running, receive, receive_until, running, send

pytestmark = pytest.mark.slow

NUM_TOKENS = 20_005  # more than the kernel's buffers and the event queue hold


def narrow(server: Running) -> socket.socket:
    """A connection whose kernel takes little from a server before its client reads."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
    found.setblocking(True)
    found.connect(("127.0.0.1", server.port))
    return found


def lazy(server: Running) -> connect:
    """A socket that reads only as far as the test does."""
    url = f"ws://127.0.0.1:{server.port}/v1/stream"
    return connect(url, sock=narrow(server), compression=None, max_queue=1, open_timeout=STUCK_S)


async def test_socket_that_stops_reading_is_parked_and_gets_every_token_once_it_reads() -> None:
    async with running() as server, lazy(server) as slow, server.socket() as quick:
        await send(slow, type="generate", request_id="s", prompt="hi", max_tokens=NUM_TOKENS,
                   seed=0)  # fmt: skip
        await until(server, lambda stats: stats.num_parked == 1)
        await send(quick, type="generate", request_id="q", prompt="hi", max_tokens=500)
        assert (await receive_until(quick, "finished"))[-1]["finish_reason"] == "length"
        parked = await settled(server)
        assert parked.num_parked == 1
        assert parked.completion_tokens_total < NUM_TOKENS
        assert await settled(server) == parked
        started, *events = await receive_until(slow, "finished")
    assert started["type"] == "started"
    assert [event["seq"] for event in events] == list(range(1, NUM_TOKENS + 2))
    assert "".join(event["text"] for event in events) == story(2, NUM_TOKENS)


async def test_as_many_requests_as_a_socket_may_have_are_parked_together() -> None:
    num_tokens = 600
    async with running(FakeEngine(max_sessions=64)) as server, lazy(server) as slow:
        for number in range(64):
            await send(slow, type="generate", request_id=str(number), prompt="hi",
                       max_tokens=num_tokens)  # fmt: skip
        await until(server, lambda stats: stats.num_parked > 0 and stats.num_running == 0)
        seqs: dict[str, list[int]] = {str(number): [] for number in range(64)}
        while any(len(found) <= num_tokens for found in seqs.values()):
            event = await receive(slow)
            if event["type"] != "started":
                seqs[event["request_id"]].append(event["seq"])
    assert all(found == list(range(1, num_tokens + 2)) for found in seqs.values())


async def test_small_event_queue_loses_nothing() -> None:
    async with running(max_queued_events=16) as server, lazy(server) as slow:
        await send(slow, type="generate", request_id="s", prompt="hi", max_tokens=NUM_TOKENS)
        await until(server, lambda stats: stats.num_parked == 1)
        events = await receive_until(slow, "finished")
    assert [event["seq"] for event in events[1:]] == list(range(1, NUM_TOKENS + 2))


async def test_cancel_gets_through_to_a_parked_request() -> None:
    async with running() as server, lazy(server) as slow:
        await send(slow, type="generate", request_id="s", prompt="hi", max_tokens=10**6)
        await until(server, lambda stats: stats.num_parked == 1)
        await send(slow, type="cancel", request_id="s")
        stats = await until(server, lambda stats: stats.num_parked == 0)
        assert stats.held_slots == 0
        last = (await receive_until(slow, "finished"))[-1]
        assert last["finish_reason"] == "cancelled"
        assert last["seq"] == stats.completion_tokens_total + 1


async def test_unkept_request_of_a_never_reading_client_is_freed_on_disconnect() -> None:
    async with running() as server, lazy(server) as slow:
        await send(slow, type="generate", request_id="s", prompt="hi", max_tokens=10**6)
        await until(server, lambda stats: stats.num_parked == 1)
        slow.transport.abort()
        await server.async_engine.drained()
        assert (await settled(server)).num_sessions == 0


async def test_detach_ends_what_was_missed_and_the_name_is_free() -> None:
    async with running() as server:
        session = await kept(server, NUM_TOKENS)
        async with lazy(server) as slow:
            await send(slow, type="resume", request_id="r", session=session, last_seq=0)
            assert (await receive(slow))["type"] == "resumed"
            await send(slow, type="detach", request_id="r")
            await send(slow, type="create", request_id="r")
            *missed, detached, created = await receive_until(slow, "created")
    assert [event["seq"] for event in missed] == list(range(1, len(missed) + 1))
    assert len(missed) < NUM_TOKENS
    assert (detached["type"], created["request_id"]) == ("detached", "r")


async def test_stream_over_http_that_is_not_read_is_parked_and_then_whole() -> None:
    async with running() as server:
        body = {"prompt": "hi", "max_tokens": NUM_TOKENS, "seed": 0, "stream": True}
        data = json.dumps(body)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(sock=narrow(server), limit=1 << 14)
        writer.write((head + data).encode())
        await until(server, lambda stats: stats.num_parked == 1)
        assert (await server.generate(prompt="hi", max_tokens=50)).status_code == 200
        answer = await reader.read()
        writer.close()
    text = _joined(answer.partition(b"\r\n\r\n")[2]).decode()
    chunks = sse.values_of(text, done=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == story(2, NUM_TOKENS)


def _joined(data: bytes) -> bytes:
    """A body that came in HTTP's chunked coding."""
    parts, start = [], 0
    while start < len(data):
        end = data.index(b"\r\n", start)
        size = int(data[start:end], 16)
        parts.append(data[end + 2 : end + 2 + size])
        start = end + 2 + size + 2
    return b"".join(parts)


async def test_long_answer_is_collected_whole(server: Running) -> None:
    answer = await server.generate(prompt="hi", max_tokens=NUM_TOKENS, seed=0)
    assert answer.json()["choices"][0]["text"] == story(2, NUM_TOKENS)
    chunks = sse_of(await server.generate(prompt="hi", max_tokens=100, seed=0, stream=True))
    assert len(chunks) == 101
