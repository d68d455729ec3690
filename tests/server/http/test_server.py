"""How the process ends: drained on a signal with 0, with 1 when the engine dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from server.http.server import bind
from tests.fakes import FakeEngine
from tests.reliability.servers import FAKE, STUCK_S, ServerProcess
from tests.server.api.talk import settled
from tests.server.harness import Gate, receive, receive_until, running, send

pytestmark = pytest.mark.process


def process(**environment: str) -> ServerProcess:
    environment = {"EVERSTREAM_DRAIN_TIMEOUT_S": "600", **environment}
    return ServerProcess("--step-ms", 2, program=FAKE, environment=environment)


def until_closed(client: ClientConnection) -> Iterator[Any]:
    with suppress(ConnectionClosed):
        while True:
            yield json.loads(client.recv(timeout=STUCK_S))


def test_signal_to_a_process_that_ends_already_leaves_its_exit_code() -> None:
    with ServerProcess(program=("tests.server.http.stopped_at_exit",)) as server:
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_completes_a_running_stream_then_1012_and_exit_0(number: signal.Signals) -> None:
    with process() as server, connect(server.stream_url, open_timeout=STUCK_S) as client:
        message = {"type": "generate", "request_id": "a", "prompt": "hi", "max_tokens": 100}
        client.send(json.dumps(message))
        client.recv(timeout=STUCK_S)
        os.kill(server.pid, number)
        messages = list(until_closed(client))
        assert [event["type"] for event in messages] == [*["token"] * 100, "finished"]
        assert messages[-1]["finish_reason"] == "length"
        assert client.close_code == 1012
        assert server.wait() == 0


def test_death_of_the_engine_ends_the_process_with_1() -> None:
    with process() as server:
        url, body = f"{server.url}/v1/completions", {"prompt": "<crash>"}
        assert httpx.post(url, json=body, timeout=STUCK_S).status_code == 500
        assert server.wait() == 1


def test_keys_and_prompts_are_not_in_the_log() -> None:
    with process(EVERSTREAM_API_KEYS="secret-key") as server:
        headers = {"authorization": "Bearer secret-key"}
        url = f"{server.url}/v1/completions"
        for prompt in ("secret-prompt", "secret-prompt <fail>", ["secret-prompt"]):
            httpx.post(url, json={"prompt": prompt}, headers=headers, timeout=STUCK_S)
        with connect(server.stream_url, additional_headers=headers, open_timeout=STUCK_S) as client:
            client.send("secret-prompt")
            client.recv(timeout=STUCK_S)
        server.stop()
        log = server.log()
    assert "draining" in log
    assert "secret" not in log


def test_accepted_connections_inherit_what_the_listener_was_given() -> None:
    with (
        bind("127.0.0.1", 0, user_timeout_ms=1234) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1234
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 1 << 18


async def test_drain_timeout_cancels_what_still_runs() -> None:
    async with running(drain_timeout_s=0.05) as server, server.socket() as client:
        await send(client, type="generate", request_id="a", prompt="hi", max_tokens=10**6)
        await receive_until(client, "token")
        server.server.stop()
        finished = (await receive_until(client, "finished"))[-1]
        assert finished["finish_reason"] == "cancelled"
        await client.wait_closed()
        assert client.close_code == 1012
        await server.done
        assert server.server.exit_code == 0


async def test_sse_stream_ends_in_order_during_a_drain() -> None:
    gate = Gate()
    async with running(FakeEngine(before_step=gate), drain_timeout_s=600) as server:
        answer = asyncio.create_task(server.generate(prompt="hi", max_tokens=50, stream=True))
        await gate.reached()
        server.server.stop()
        await asyncio.wait([server.done], timeout=0)
        gate.open()
        assert (await answer).text.endswith("data: [DONE]\n\n")
        await server.done
        assert server.server.exit_code == 0


async def test_idle_socket_gets_1012_at_once() -> None:
    async with running(drain_timeout_s=60) as server, server.socket() as client:
        await send(client, type="create", request_id="a")
        await receive(client)
        server.server.stop()
        await client.wait_closed()
        assert client.close_code == 1012


async def test_socket_that_comes_during_a_drain_gets_1012() -> None:
    gate = Gate()
    async with running(FakeEngine(before_step=gate)) as server:
        work = asyncio.create_task(server.generate(prompt="hi", max_tokens=1))
        await gate.reached()
        server.async_engine.begin_drain()
        async with server.socket() as client:
            await client.wait_closed()
            assert client.close_code == 1012
        gate.open()
        assert (await work).status_code == 200


async def test_second_signal_does_not_wait() -> None:
    async with running(drain_timeout_s=600) as server, server.socket() as client:
        await send(client, type="generate", request_id="a", prompt="hi", max_tokens=10**6)
        await receive_until(client, "token")
        server.server.stop()
        server.server.stop()
        finished = (await receive_until(client, "finished"))[-1]
        assert finished["finish_reason"] == "cancelled"
        await client.wait_closed()
        assert client.close_code == 1012
        await server.done
        assert server.server.exit_code == 0


async def test_storm_of_disconnects_leaves_nothing_behind() -> None:
    async with running(FakeEngine(max_sessions=64)) as server:

        async def visit(number: int) -> None:
            async with server.socket() as client:
                for name in ("a", "b"):
                    await send(
                        client, type="generate", request_id=name, prompt="hi", max_tokens=10**5
                    )
                for _ in range(number % 7):
                    await client.recv()
                if number % 2:
                    await send(client, type="cancel", request_id="a")
                if number % 3 == 0:
                    client.transport.abort()

        for start in range(0, 60, 20):
            await asyncio.gather(*(visit(start + number) for number in range(20)))
        async with asyncio.timeout(STUCK_S):
            await server.async_engine.drained()
        stats = await settled(server)
        assert (stats.held_slots, stats.num_running) == (0, 0)
