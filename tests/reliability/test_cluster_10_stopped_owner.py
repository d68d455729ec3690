"""10, across replicas: one is stopped past its lease, another takes over, the first one wakes."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import cluster_of
from tests.chaos.logs import logs_of
from tests.reliability.heirs import (
    TRIES_S,
    Heir,
    check_inheritance,
    endless,
)
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.streams import (
    ENDLESS,
    SAMPLING,
    Frame,
    KeptStream,
    answer,
    ask,
    kept_streams,
    place_of,
    rest_of,
    run_all,
    socket_of,
    write_tiny_model,
)
from tests.stopping import stop


@pytest.mark.timeout(240)
async def test_fenced_replica_writes_nothing_sends_nothing_and_exits(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    streams = kept_streams(4, history, odometer, max_tokens=ENDLESS)
    async with cluster_of(model, num_replicas=2, wires="direct") as cluster:
        first, second = cluster.replicas
        first.hold()
        reading = asyncio.create_task(run_all(streams, first.process.stream_url, owner="first"))
        async with socket_of(first.process.stream_url) as bystander:
            await endless(bystander)
            await odometer.reach(400)
            stop(first.process.pid)
            # Others continue where the first one stands; its own readers hear nothing yet.
            heirs = [Heir(stream, history) for stream in streams]
            await asyncio.gather(*(heir.read(second.process.stream_url, 200) for heir in heirs))
            first.signal(signal.SIGCONT)
            async with asyncio.timeout(TRIES_S):
                await first.ended(0)
            assert first.exits[0].code == 1
            last = (await rest_of(bystander))[-1]
            await reading
        log = await logs_of(cluster, model)
    assert last["type"] in ("token", "error"), last
    check_inheritance(heirs, history, log, model)


@pytest.mark.timeout(240)
async def test_replica_that_was_stopped_for_less_than_its_lease_loses_nothing(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    streams = kept_streams(4, history, odometer, max_tokens=ENDLESS)
    # A lease that no busy machine outlasts.
    environment = {"EVERSTREAM_STORE_LEASE_S": "60"}
    async with cluster_of(
        model, num_replicas=2, wires="direct", environment=environment
    ) as cluster:
        first, second = cluster.replicas
        reading = asyncio.create_task(run_all(streams, first.process.stream_url))
        await odometer.reach(200)
        stop(first.process.pid)
        async with socket_of(second.process.stream_url) as rival:
            (stream, *_) = streams
            await ask(rival, type="resume", request_id="r", **place_of(stream))
            refused = await answer(rival)
            assert refused["error"]["code"] == "session_elsewhere"
        first.signal(signal.SIGCONT)
        for stream in streams:
            await stream.cancel()
        assert set(await reading) == {"finished"}
        assert not first.exits
        log = await logs_of(cluster, model)
    history.check(log)


@pytest.mark.timeout(240)
async def test_fenced_replica_sends_no_events_of_its_former_sessions(tmp_path: Path) -> None:
    """It is asked before it can know that they have gone on elsewhere."""
    model = write_tiny_model(tmp_path / "model")
    body = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 1, **SAMPLING}
    streams = [KeptStream(f"c{number}", History(), **body) for number in range(8)]
    async with cluster_of(model, num_replicas=2, wires="direct") as cluster, AsyncExitStack() as on:
        first, second = cluster.replicas
        first.hold()
        url = first.process.stream_url
        assert set(await run_all(streams, url)) == {"finished"}
        sockets = [await on.enter_async_context(socket_of(url)) for _ in streams]
        stop(first.process.pid)
        for stream in streams:
            more = {"session": stream.session, "type": "generate", **body}
            last = await last_frame(second.process.stream_url, more)
            assert last["seq"] == 2 * stream.last_seq
        for stream, socket in zip(streams, sockets, strict=True):
            place = place_of(stream, last["seq"])
            await ask(socket, type="resume", request_id="r", **place)
        first.signal(signal.SIGCONT)
        for told in await asyncio.gather(*map(rest_of, sockets)):
            assert all((one["type"], one.get("status")) == ("error", 503) for one in told), told


async def last_frame(url: str, message: dict[str, Any]) -> Frame:
    """The end of a generation, once it is let begin."""
    async with asyncio.timeout(TRIES_S):
        while True:
            async with socket_of(url) as socket:
                await ask(socket, request_id="g", **message)
                while (frame := await answer(socket))["type"] in ("started", "token"):
                    pass
            if frame["type"] == "finished":
                return frame
            assert frame["error"]["code"] == "session_elsewhere", frame
            await asyncio.sleep(0.1)
