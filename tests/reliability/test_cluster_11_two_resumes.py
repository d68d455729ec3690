"""11, across replicas: two resumes of a session at once, at two of them: one wins."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.cluster import cluster_of
from tests.chaos.logs import logs_of
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.rivals import winner_of
from tests.reliability.streams import (
    ENDLESS,
    End,
    KeptStream,
    answer,
    ask,
    client_of,
    kept_streams,
    place_of,
    run_all,
    socket_of,
    twin_of,
    write_tiny_model,
)

NUM_SESSIONS = 4
TRIES_S = 120


async def resumed_at(url: str, stream: KeptStream) -> End:
    """How it ended, once it was told: while a replica is being reclaimed it is not known."""
    async with asyncio.timeout(TRIES_S):
        while await stream.run(url) == "error":
            if stream.frames[-1]["error"]["code"] != "session_elsewhere":
                break
            await asyncio.sleep(0.05)
    return stream.ends[-1]


@pytest.mark.timeout(240)
async def test_after_a_crash_one_of_two_replicas_wins_and_misses_nothing(tmp_path: Path) -> None:
    """The sessions have no owner, and both ask for them."""
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    streams = kept_streams(NUM_SESSIONS, history, odometer, max_tokens=ENDLESS)
    async with cluster_of(model, wires="direct") as cluster:
        first, *others = cluster.replicas
        running = asyncio.create_task(run_all(streams, first.process.stream_url))
        await odometer.reach(NUM_SESSIONS * 20)
        first.hold()
        first.signal(signal.SIGKILL)
        await running
        pairs = [(stream, twin_of(stream, history)) for stream in streams]
        reads = [partial(resumed_at, replica.process.stream_url) for replica in others]
        winners = await asyncio.gather(*(winner_of(pair, *reads) for pair in pairs))
        log = await logs_of(cluster, model)
    history.readers = [winner.reader for winner in winners if winner.reader is not None]
    history.check(log)


@pytest.mark.timeout(240)
async def test_reader_at_another_replica_blocks_a_resume_without_take_over(tmp_path: Path) -> None:
    model, history, odometer = write_tiny_model(tmp_path / "model"), History(), Odometer()
    (stream,) = kept_streams(1, history, odometer, max_tokens=ENDLESS)
    async with cluster_of(model, num_replicas=2, wires="direct") as cluster:
        first, second = cluster.replicas
        reading = asyncio.create_task(stream.run(first.process.stream_url, "first"))
        await odometer.reach(50)
        path, cursor = f"/v1/sessions/{stream.session}/events", {"starting_after": 0}
        async with client_of(second.process.url) as client:
            refused = await client.get(path, params=cursor)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_attached")
        place = place_of(stream)
        async with socket_of(second.process.stream_url) as socket:
            await ask(socket, type="resume", request_id="r", **place)
            refusal = await answer(socket)
            assert (refusal["status"], refusal["error"]["code"]) == (409, "session_attached")
            assert not reading.done()
            await ask(socket, type="resume", request_id="s", take_over=True, **place)
            resumed = await answer(socket)
            assert resumed["type"] == "resumed", resumed
            rival = history.reader("rival", stream.session)
            rival.attach(resumed["epoch"], 0, "second")
            history.owned(stream.session, "first", resumed["epoch"], 0)
            history.owned(stream.session, "second", resumed["epoch"], resumed["last_seq"])
            while rival.last_seq < resumed["last_seq"] + 100:
                rival.saw_frame(await answer(socket))
            # The first one is told, by an error or by being sent where it went.
            assert await reading in ("error", "migrate")
            assert stream.last_seq <= resumed["last_seq"]
        log = await logs_of(cluster, model)
    history.check(log, complete=False)
