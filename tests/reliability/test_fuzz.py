"""Thousands of odd clients, each with what it deserves; nothing of them stays."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from benchmarks.websocket import CLOSE, frame
from tests.fakes import FakeEngine
from tests.reliability.fuzz import FORBIDDEN, script, visit
from tests.reliability.servers import STUCK_S
from tests.server.harness import running

AT_ONCE = 8


def test_seed_alone_decides_what_is_sent() -> None:
    assert script(7) == script(7)
    assert script(7) != script(8)


def test_short_form_tries_every_rule() -> None:
    tried = {script(seed)[-1].what for seed in range(300)}
    assert {make(Random(0)).what for make in FORBIDDEN} <= tried


@pytest.mark.timeout(1800)
async def test_malformed_clients_get_errors_and_leak_nothing(
    long: bool, caplog: pytest.LogCaptureFixture
) -> None:
    num_visits = 20_000 if long else 300
    async with running(FakeEngine(max_sessions=4096)) as server:
        for start in range(0, num_visits, AT_ONCE):
            await asyncio.gather(
                *(visit(server.port, seed) for seed in range(start, start + AT_ONCE))
            )
        await server.until_disconnected()
        async with asyncio.timeout(STUCK_S):
            await server.async_engine.drained()
        assert server.async_engine.healthy
        assert (await server.stats()).num_running == 0
        assert (await server.generate(prompt="hi", max_tokens=1)).status_code == 200
    assert "Traceback" not in caplog.text


async def test_wrong_answer_is_detected() -> None:
    """A server that closes with 1000 whatever comes is not what the fuzzer wants."""
    seed = next(seed for seed in range(100) if script(seed)[-1].what == "reserved bits")
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        await reader.read(1)
        writer.write(frame(CLOSE, b"\x03\xe8", mask=None))
        writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        served.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as indulgent:
        with pytest.raises(AssertionError, match=f"seed {seed}: .*closed with 1000"):
            await visit(indulgent.sockets[0].getsockname()[1], seed)
        await served.wait()
