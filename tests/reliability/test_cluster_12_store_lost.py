"""12, across replicas: the store is away for a while, or comes back empty."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.cluster import Cluster, cluster_of
from tests.chaos.logs import logs_of
from tests.chaos.replicas import Replica
from tests.reliability.history import History
from tests.reliability.lost_stores import (
    check_lost,
    check_only_kept_work_is_refused,
    check_reset,
)
from tests.reliability.odometer import Odometer
from tests.reliability.servers import STUCK_S, eventually
from tests.reliability.soloist import Soloist, check_alone
from tests.reliability.streams import (
    ENDLESS,
    PROMPT,
    SAMPLING,
    KeptStream,
    kept_streams,
    run_all,
    write_tiny_model,
)


def is_ready(replica: Replica) -> bool:
    try:
        return replica.is_up and replica.process.get("/ready")[0] == 200
    except OSError:
        return False


async def all_ready(cluster: Cluster) -> None:
    await eventually(lambda: all(is_ready(replica) for replica in cluster.replicas))


async def read_on(cluster: Cluster, streams: list[KeptStream]) -> None:
    """Every stream, at one replica after the other, until one continues it and it is cancelled."""

    async def read(index: int, stream: KeptStream) -> None:
        async with asyncio.timeout(STUCK_S):
            while not stream.is_finished:
                index += 1
                replica = cluster.replicas[index % len(cluster.replicas)]
                await stream.run(replica.process.stream_url, replica.incarnation, num_tokens=100)
                await asyncio.sleep(0.1)

    await asyncio.gather(*(read(index, stream) for index, stream in enumerate(streams)))


async def run_on_two(cluster: Cluster, streams: list[KeptStream]) -> None:
    """Half of them at each of two replicas, until each connection has ended."""
    first, second, *_ = (replica.process.stream_url for replica in cluster.replicas)
    await asyncio.gather(run_all(streams[::2], first), run_all(streams[1::2], second))


@pytest.mark.timeout(300)
async def test_sessions_continue_after_the_store_is_back(tmp_path: Path, long: bool) -> None:
    """No session continues meanwhile, and afterwards each has one owner again."""
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    streams = kept_streams(4, history, odometer, max_tokens=ENDLESS)
    async with cluster_of(model, wires="direct") as cluster:
        running = asyncio.create_task(run_on_two(cluster, streams))
        await odometer.reach(400)
        await asyncio.to_thread(cluster.postgres.kill)
        await running
        check_lost(streams)
        seen = odometer.num_tokens
        for url in cluster.urls():
            await check_only_kept_work_is_refused(url)
        await asyncio.sleep(30 if long else 2)
        assert odometer.num_tokens == seen
        await asyncio.to_thread(cluster.postgres.start)
        await read_on(cluster, streams)
        log = await logs_of(cluster, model)
    check_alone(streams, history, log, model)


@pytest.mark.timeout(300)
async def test_empty_store_resets_sessions(tmp_path: Path) -> None:
    """What a client has of the old one is answered by a reset, at every replica."""
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    streams = kept_streams(4, history, odometer, max_tokens=ENDLESS)
    async with cluster_of(model, wires="direct") as cluster:
        running = asyncio.create_task(run_on_two(cluster, streams))
        await odometer.reach(400)
        await asyncio.to_thread(cluster.lose_store)
        await running
        check_lost(streams)  # their work was lost with the store
        await all_ready(cluster)
        for replica in cluster.replicas:
            ends = await run_all(streams, replica.process.stream_url)
            assert set(ends) == {"reset"}
            check_reset(streams)
        # The new store is as good as any, for all of them alike.
        fresh = [
            KeptStream(f"n{index}", history, prompt=PROMPT, max_tokens=50, **SAMPLING)
            for index in range(3)
        ]
        for stream, replica in zip(fresh, cluster.replicas, strict=True):
            assert await stream.run(replica.process.stream_url) == "finished"
        log = await logs_of(cluster, model)
    history.check(log, complete=False)
    assert {session for session, _ in log} == {one.session for one in (*streams, *fresh)}
    soloist = Soloist(model)
    for (session, _), events in log.items():
        (stream,) = [one for one in (*streams, *fresh) if one.session == session]
        if "seed" not in stream.body:
            continue
        logged = [event.token_id for event in events if event.token_id is not None]
        assert logged == soloist.tokens(**{**stream.body, "max_tokens": len(logged)})
