"""Sessions move between the replicas of a cluster, and their streams go on.

One cluster on one PostgreSQL, between one replica and two, goes through all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.postgres import Postgres
from tests.reliability.history import History
from tests.reliability.servers import ServerProcess
from tests.reliability.streams import (
    KeptStream,
    Odometer,
    Soloist,
    answer,
    ask,
    client_of,
    socket_of,
    write_tiny_model,
)
from tests.server.distributed.ray.clusters import REPLICA, OnRay

PROMPT = "Who lives in the hollow tree?"
SAMPLING: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 10**6, **SAMPLING}
#: More than one replica is meant to run, and what is kept here is less.
LOAD = 6
ENVIRONMENT = {"EVERSTREAM_TARGET_STREAMS": "5", "EVERSTREAM_SCALE_DOWN_DELAY_S": "1"}
WAIT_S = 90.0

# A replica takes seconds to start, and longer where the machine is busy.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("moving") / "model")


@pytest.fixture(scope="module")
def database(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture(scope="module")
def moving(database: str, model: Path) -> Iterator[OnRay]:
    flags = ("--model", f"tiny={model}", "--store", database)
    server = ServerProcess("--ray", "--replicas", "1-2", *flags, environment=ENVIRONMENT)
    with OnRay(server) as cluster:
        yield cluster


async def hints(cluster: OnRay) -> dict[str, str]:
    """For each of two replicas the name of a session that leads there; waits for both."""
    found: dict[str, str] = {}
    async with asyncio.timeout(WAIT_S), client_of(cluster.url) as http:
        for number in itertools.count():
            session = f"sess_{number:032x}"
            response = await http.get("/health", headers={"X-Session-Id": session})
            found[response.headers[REPLICA]] = session
            if len(found) == 2:
                break
            await asyncio.sleep(0.1)
    return found


async def load(cluster: OnRay, stack: AsyncExitStack) -> None:
    """Endless streams that nobody keeps, until ``stack`` ends."""
    for number in range(LOAD):
        socket = await stack.enter_async_context(socket_of(cluster.stream_url))
        await ask(socket, type="generate", request_id=f"load-{number}", **ENDLESS)
        assert (await answer(socket))["type"] == "started"


class Streams:
    """Kept streams, one by each replica, that the tests follow wherever they go."""

    def __init__(self, cluster: OnRay, name: str) -> None:
        self.server: OnRay | ServerProcess = cluster
        self.name = name
        self.all: list[KeptStream] = []
        self.odometers: dict[KeptStream, Odometer] = {}
        self.reading: dict[KeptStream, asyncio.Task[Any]] = {}
        self._history = History()

    async def begin(self, sessions: Mapping[str, str]) -> None:
        for number, session in enumerate(sessions.values()):
            name = f"{self.name}-{number}"
            odometer = Odometer()
            stream = KeptStream(name, self._history, odometer, seed=number, **ENDLESS)
            self.all.append(stream)
            self.odometers[stream] = odometer
            self._read(stream, session)
        for odometer in self.odometers.values():
            await odometer.reach(100)

    async def ended(self) -> list[KeptStream]:
        """Those whose connection has ended, when the first one has."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait(self.reading.values(), return_when=asyncio.FIRST_COMPLETED)
        return [stream for stream, task in self.reading.items() if task.done()]

    async def resume(self, stream: KeptStream) -> None:
        """Goes on, as often as that takes, and returns when there are more tokens."""
        odometer = self.odometers[stream]
        more = asyncio.create_task(odometer.reach(odometer.num_tokens + 100))
        while not more.done():
            reading = self._read(stream, stream.session)
            await asyncio.wait({reading, more}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                assert reading.result() == "broken", stream.frames[-1]
        await more

    async def finish(self, model: Path) -> None:
        """Cancels all, and checks them against a run that nothing has disturbed."""
        for stream in self.all:
            async with client_of(self.server.url) as http:
                await http.post(f"/v1/sessions/{stream.session}/cancel")
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self.reading.values())
        for stream in self.all:
            assert stream.ends[-1] == "finished", (stream.ends, stream.frames[-1])
        soloist = Soloist(model)
        for stream in self.all:
            body = {**stream.body, "max_tokens": len(stream.tokens)}
            assert stream.tokens == soloist.tokens(**body), stream.name

    def _read(self, stream: KeptStream, session: str) -> asyncio.Task[Any]:
        url = f"{self.server.stream_url}?session={session}"
        self.reading[stream] = asyncio.create_task(stream.run(url))
        return self.reading[stream]


async def ask_until_cancelled(cluster: OnRay) -> None:
    """New work, over and over; whoever is turned away by one replica is served by another."""
    body = {"prompt": PROMPT, "max_tokens": 1}
    async with client_of(cluster.url) as http:
        while True:
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text


async def test_killed_replicas_sessions_go_on_at_another(moving: OnRay, model: Path) -> None:
    async with AsyncExitStack() as stack:
        await load(moving, stack)
        streams = Streams(moving, "killed")
        await streams.begin(await hints(moving))
        pids = [pid for pid, name in moving.processes().items() if "ServeReplica" in name]
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        (broken,) = await streams.ended()
        assert broken.ends == ["broken"]
        await streams.resume(broken)
        await streams.finish(model)


async def test_scale_down_moves_the_streams_of_the_replica_that_goes(
    moving: OnRay, model: Path
) -> None:
    streams = Streams(moving, "scaled")
    async with AsyncExitStack() as stack:
        await load(moving, stack)
        await streams.begin(await hints(moving))
    asking = asyncio.create_task(ask_until_cancelled(moving))
    (moved,) = await streams.ended()
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking  # or what it was answered
    assert moved.ends == ["migrate"], moved.frames[-1]
    assert moved.close_code == 1012
    assert moved.frames[-1]["seq"] == moved.last_seq
    await streams.resume(moved)
    assert moved.resumed[0]["seq"] == moved.resumed[0]["last_seq"], "made and not sent"
    await streams.finish(model)


async def test_end_of_the_cluster_leaves_its_sessions_to_whoever_has_the_store(
    moving: OnRay, model: Path, database: str
) -> None:
    streams = Streams(moving, "stopped")
    await streams.begin({"any": "sess_1", "other": "sess_2"})
    assert await asyncio.to_thread(moving.stop) == 0
    assert await asyncio.gather(*streams.reading.values()) == ["migrate", "migrate"]
    assert {stream.close_code for stream in streams.all} == {1012}
    with ServerProcess("--model", f"tiny={model}", "--store", database) as single:
        streams.server = single
        for stream in streams.all:
            await streams.resume(stream)
        await streams.finish(model)
