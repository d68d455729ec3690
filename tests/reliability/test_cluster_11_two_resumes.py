"""11, across replicas: two resumes of a session at once, at two of them: one wins."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import cluster_of
from tests.chaos.logs import logs_of
from tests.reliability.history import History
from tests.reliability.streams import (
    KeptStream,
    Odometer,
    answer,
    ask,
    client_of,
    run_all,
    socket_of,
    write_tiny_model,
)

NUM_SESSIONS = 4
BODY: dict[str, Any] = {"prompt": "Who lives there?", "temperature": 0.9, "ignore_eos": True}
TRIES_S = 60


def twin_of(stream: KeptStream, history: History) -> KeptStream:
    """Another client that has seen just as much of the same session."""
    twin = KeptStream(f"{stream.name} again", history, **stream.body)
    twin.epoch = stream.epoch
    twin.reader = history.reader(twin.name, stream.session)
    twin.reader.attach(stream.epoch, stream.last_seq)
    return twin


async def resumed_at(stream: KeptStream, url: str) -> str:
    """How it ended, once it was told: while a replica is being reclaimed nobody knows."""
    async with asyncio.timeout(TRIES_S):
        while await stream.run(url) == "error":
            if stream.frames[-1]["error"]["code"] != "session_elsewhere":
                break
            await asyncio.sleep(0.05)
    return stream.ends[-1]


@pytest.mark.timeout(240)
async def test_after_a_crash_one_of_two_replicas_wins_and_misses_nothing(tmp_path: Path) -> None:
    """The sessions are nobody's, and both want them."""
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    streams = [
        KeptStream(f"c{seed}", history, odometer, seed=seed, max_tokens=1500, **BODY)
        for seed in range(NUM_SESSIONS)
    ]
    async with cluster_of(model, wires="direct") as cluster:
        first, *others = cluster.replicas
        running = asyncio.create_task(run_all(streams, first.process.stream_url))
        await odometer.reach(NUM_SESSIONS * 20)
        first.hold()
        first.signal(signal.SIGKILL)
        await running
        pairs = [(stream, twin_of(stream, history)) for stream in streams if stream.reader]
        urls = [replica.process.stream_url for replica in others]
        ends = await asyncio.gather(
            *(resumed_at(one, url) for pair in pairs for one, url in zip(pair, urls, strict=True))
        )
        both = [one for pair in pairs for one in pair]
        for index in range(0, len(ends), 2):
            # Where the first had read to the end, the second may have had it all as well.
            assert sorted(ends[index : index + 2]) in (
                ["error", "finished"],
                ["finished", "finished"],
            )
        refusals = [one.frames[-1] for one in both if one.ends[-1] == "error"]
        assert refusals, "no two met"
        assert {(frame["status"], frame["error"]["code"]) for frame in refusals} == {
            (409, "session_attached")
        }
        log = await logs_of(cluster, model)
    history.readers = [one.reader for one in both if one.is_finished and one.reader is not None]
    assert len(history.readers) >= len(pairs)
    history.check(log)


@pytest.mark.timeout(240)
async def test_reader_elsewhere_is_respected_unless_it_is_taken_over(tmp_path: Path) -> None:
    model, history, odometer = write_tiny_model(tmp_path / "model"), History(), Odometer()
    stream = KeptStream("first", history, odometer, max_tokens=10_000, **BODY)
    async with cluster_of(model, num_replicas=2, wires="direct") as cluster:
        first, second = cluster.replicas
        reading = asyncio.create_task(stream.run(first.process.stream_url, "first"))
        await odometer.reach(50)
        path, cursor = f"/v1/sessions/{stream.session}/events", {"starting_after": 0}
        async with client_of(second.process.url) as client:
            refused = await client.get(path, params=cursor)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_attached")
        place = {"session": stream.session, "epoch": stream.epoch, "last_seq": 0}
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
