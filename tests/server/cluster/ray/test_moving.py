"""Sessions move between the replicas of a cluster, and their streams continue.

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
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from server.cluster.ray.proxy import tag_of
from tests.postgres import Postgres
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess
from tests.reliability.soloist import Soloist
from tests.reliability.streams import End, KeptStream, answer, ask, client_of, socket_of
from tests.server.cluster.ray.clusters import HANGS_S, REPLICA, OnRay
from tests.server.cluster.ray.held_proxy import LOCK, PROGRAM, held
from tests.tiny import write_model
from tests.waiting import eventually

PROMPT = "Who lives in the hollow tree?"
SAMPLING: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 10**6, **SAMPLING}
#: More than one replica is meant to run, and what is kept here is less.
LOAD = 6
ENVIRONMENT = {"EVERSTREAM_TARGET_STREAMS": "5", "EVERSTREAM_SCALE_DOWN_DELAY_S": "1"}
WAIT_S = 300.0
RETRY_S = 0.05

pytestmark = pytest.mark.timeout(HANGS_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moving") / "model")


@pytest.fixture(scope="module")
def database(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While it is `held`, the proxy passes no ``migrate`` on."""
    return tmp_path_factory.mktemp("proxy") / "lock"


@pytest.fixture(scope="module")
def moving(database: str, model: Path, lock: Path) -> Iterator[OnRay]:
    flags = ("--ray", "--replicas", "1-2", "--model", f"tiny={model}", "--store", database)
    environment = {**ENVIRONMENT, LOCK: str(lock)}
    server = ServerProcess(*flags, program=PROGRAM, environment=environment)
    with OnRay(server) as cluster:
        yield cluster


async def hints(cluster: OnRay) -> dict[str, str]:
    """For each of two replicas the name of a session that leads there; waits for both."""
    found: dict[str, str] = {}
    numbers = itertools.count()
    async with client_of(cluster.url) as http:

        async def both() -> bool:
            session = f"sess_{next(numbers):032x}"
            response = await http.get("/health", headers={"X-Session-Id": session})
            found[response.headers[REPLICA]] = session
            return len(found) == 2

        await eventually(both, WAIT_S)
    return found


async def load(cluster: OnRay, stack: AsyncExitStack) -> None:
    """Endless streams that are not kept, until ``stack`` ends."""
    for number in range(LOAD):
        socket = await stack.enter_async_context(socket_of(cluster.stream_url))
        await ask(socket, type="generate", request_id=f"load-{number}", **ENDLESS)
        assert (await answer(socket))["type"] == "started"
        stack.push_async_callback(cancelled, socket, f"load-{number}")


async def cancelled(socket: ClientConnection, request_id: str) -> None:
    """Returns when the replica has ended the request, on which a drain would wait, or is gone."""
    with contextlib.suppress(ConnectionClosed):
        await ask(socket, type="cancel", request_id=request_id)
        while (await answer(socket))["type"] == "token":
            pass


class Streams:
    """Kept streams that are followed wherever they go, as often as that takes."""

    def __init__(self, cluster: OnRay, name: str) -> None:
        self.server: OnRay | ServerProcess = cluster
        self.name = name
        self.all: list[KeptStream] = []
        self._odometers: list[Odometer] = []
        self._following: list[asyncio.Task[None]] = []
        self._history = History()
        self._ended = asyncio.Condition()

    async def begin(self, sessions: Mapping[str, str]) -> None:
        """One with each of ``sessions`` for a hint."""
        for number, session in enumerate(sessions.values(), start=len(self.all)):
            odometer = Odometer()
            name = f"{self.name}-{number}"
            stream = KeptStream(name, self._history, odometer, seed=number, **ENDLESS)
            self.all.append(stream)
            self._odometers.append(odometer)
            self._following.append(asyncio.create_task(self._follow(stream, session)))
        await self.go_on()

    async def first(self, end: End) -> KeptStream:
        """The first stream of which a connection ends so."""

        def found() -> list[KeptStream]:
            return [stream for stream in self.all if end in stream.ends]

        async with asyncio.timeout(WAIT_S), self._ended:
            await self._ended.wait_for(found)
        return found()[0]

    async def go_on(self) -> None:
        """Returns when each has had more tokens."""
        for odometer in self._odometers:
            await odometer.reach(odometer.num_tokens + 100)

    async def finish(self, model: Path) -> None:
        """Cancels all, and checks them against a run that nothing has disturbed."""
        for stream in self.all:
            async with client_of(self.server.url) as http:
                await http.post(f"/v1/sessions/{stream.session}/cancel")
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self._following)
        soloist = Soloist(model)
        for stream in self.all:
            assert set(stream.ends) <= {"migrate", "broken", "finished"}, stream.ends
            body = {**stream.body, "max_tokens": len(stream.tokens)}
            assert stream.tokens == soloist.tokens(**body), stream.name

    async def _follow(self, stream: KeptStream, session: str) -> None:
        while not stream.is_finished:
            await stream.run(f"{self.server.stream_url}?session={session}")
            session = stream.session
            if stream.ends[-1] == "migrate":
                assert stream.close_code == 1012
                assert stream.frames[-1]["seq"] == stream.last_seq
            elif not stream.is_finished:
                await asyncio.sleep(RETRY_S)
            async with self._ended:
                self._ended.notify_all()


def maker_of(stream: KeptStream) -> str:
    """The replica that made the stream's session, by the tag in the session's name."""
    start = len("sess_")
    return stream.session[start : start + len(tag_of("any"))]


async def ask_until_cancelled(cluster: OnRay) -> None:
    """New work, over and over; what is turned away by one replica is served by another."""
    body = {"prompt": PROMPT, "max_tokens": 1}
    async with client_of(cluster.url) as http:
        while True:
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text


async def test_killed_replicas_sessions_go_on_at_another(moving: OnRay, model: Path) -> None:
    async with AsyncExitStack() as stack:
        await load(moving, stack)
        streams = Streams(moving, "killed")
        # A hint does not bind: where the router took both streams to one replica, there are more.
        while len({maker_of(stream) for stream in streams.all}) < 2:
            await streams.begin(await hints(moving))
        pids = moving.named("ServeReplica")
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        await streams.first("broken")
        await streams.go_on()
        await streams.finish(model)


async def test_scale_down_moves_the_streams_of_the_replica_that_goes(
    moving: OnRay, model: Path
) -> None:
    streams = Streams(moving, "scaled")
    async with AsyncExitStack() as stack:
        await load(moving, stack)
        await streams.begin(await hints(moving))
    asking = asyncio.create_task(ask_until_cancelled(moving))
    moved = await streams.first("migrate")
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking  # or what it was answered
    await streams.go_on()
    assert moved.resumed[0]["seq"] == moved.resumed[0]["last_seq"], "made and not sent"
    await streams.finish(model)


async def test_end_of_the_cluster_leaves_its_sessions_to_whoever_has_the_store(
    moving: OnRay, model: Path, database: str, lock: Path
) -> None:
    """Its readers hear of it, however long the proxy takes to pass on what the replicas said."""
    streams = Streams(moving, "stopped")
    await streams.begin({"any": "sess_1", "other": "sess_2"})
    with held(lock):
        stopping = asyncio.create_task(asyncio.to_thread(moving.stop))
        await eventually(lambda: "the replicas have ended" in moving.server.log())
    assert await stopping == 0
    with ServerProcess("--model", f"tiny={model}", "--store", database) as single:
        streams.server = single
        await streams.go_on()
        await streams.finish(model)
    ends = [stream.ends[0] for stream in streams.all]
    assert ends == ["migrate", "migrate"], moving.server.log()
