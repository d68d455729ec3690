"""29: a thread is dead: the process leaves, and not with 0. One hangs: liveness turns red."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess
from tests.reliability.streams import KeptStream, answer, ask, socket_of
from tests.waiting import eventually

DRAIN_TIMEOUT_S = 1.0


def faulty(fault: str, store: Path) -> ServerProcess:
    program = ("tests.reliability.faulty_server", fault)
    return ServerProcess("--store", store, "--drain-timeout", DRAIN_TIMEOUT_S, program=program)


async def meet_fault(server: ServerProcess) -> tuple[KeptStream, asyncio.Task[str]]:
    """A kept stream is at work when the fault comes."""
    odometer = Odometer()
    stream = KeptStream("kept", History(), odometer, prompt="hi", max_tokens=10**6)
    reading = asyncio.create_task(stream.run(server.stream_url))
    await odometer.reach(10)
    os.kill(server.pid, signal.SIGUSR1)
    return stream, reading


@pytest.mark.parametrize("fault", ["engine-dies", "engine-panics", "store-dies", "store-panics"])
async def test_process_leaves_with_1_when_a_thread_has_died(fault: str, tmp_path: Path) -> None:
    with faulty(fault, tmp_path) as server:
        async with socket_of(server.stream_url) as bystander:
            await ask(bystander, type="generate", request_id="b", prompt="hi", max_tokens=10**6)
            assert (await answer(bystander))["type"] == "started"
            _, reading = await meet_fault(server)
            assert await asyncio.to_thread(server.wait) == 1
            await reading
            await bystander.wait_closed()


async def test_liveness_turns_red_when_a_thread_hangs(tmp_path: Path) -> None:
    """Both at the same time: each waits for the deadlines of its server."""
    async with asyncio.TaskGroup() as group:
        for fault in ("engine-hangs", "store-hangs"):
            group.create_task(hang(fault, tmp_path / fault))


async def hang(fault: str, store: Path) -> None:
    with faulty(fault, store) as server:
        assert (await asyncio.to_thread(server.get, "/health"))[0] == 200
        stream, reading = await meet_fault(server)
        await eventually(lambda: server.get("/health")[0] == 503)
        assert server.get("/ready")[0] == 503
        assert server.get("/metrics")[0] == 200
        assert not reading.done()
        # Its supervisor ends it now, and it does end, though not well.
        assert await asyncio.to_thread(server.stop) == 1
        await reading
    assert stream.ends[-1] in ("broken", "error")
