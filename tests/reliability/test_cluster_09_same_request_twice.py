"""9, across replicas: the same work under the same key at two of them: it is done once."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.cluster import Cluster, cluster_of
from tests.chaos.replicas import Replica
from tests.reliability.history import History
from tests.reliability.streams import (
    PROMPT,
    SAMPLING,
    Frame,
    KeptStream,
    client_of,
    events_of,
    write_tiny_model,
)

BODY: dict[str, Any] = {"prompt": PROMPT, "seed": 3, **SAMPLING}
#: A second one comes again.
NOT_YET = {"key_in_use", "session_attached", "session_elsewhere"}
TRIES_S = 120


async def generated(replica: Replica, key: str, max_tokens: int = 50) -> list[Frame]:
    """Everything that one connection gets for the work."""
    stream = KeptStream(key, History(), max_tokens=max_tokens, **BODY)
    await stream.run(replica.process.stream_url)
    return stream.frames


async def generated_in_the_end(replica: Replica, key: str, max_tokens: int = 50) -> list[Frame]:
    """The same, asked for until it is told."""
    async with asyncio.timeout(TRIES_S):
        while True:
            frames = await generated(replica, key, max_tokens)
            if frames and frames[-1]["type"] == "finished":
                return frames
            assert not frames or frames[-1]["error"]["code"] in NOT_YET, frames[-1]
            await asyncio.sleep(0.05)


async def num_sessions(cluster: Cluster) -> int:
    async with client_of(cluster.urls()[-1]) as client:
        return len((await client.get("/v1/sessions")).json()["data"])


async def test_two_replicas_at_the_same_moment_do_the_work_once(tmp_path: Path) -> None:
    async with cluster_of(write_tiny_model(tmp_path / "model"), wires="direct") as cluster:
        for number in range(5):
            key = f"work {number}"
            asked = (generated(replica, key) for replica in cluster.replicas)
            told = await asyncio.gather(*asked)
            whole = [frames for frames in told if frames[-1]["type"] == "finished"]
            refused = {frames[-1]["error"]["code"] for frames in told if frames not in whole}
            assert whole
            assert refused <= NOT_YET
            whole += [await generated_in_the_end(replica, key) for replica in cluster.replicas]
            assert all(events_of(frames) == events_of(whole[0]) for frames in whole)
            assert [frame["seq"] for frame in events_of(whole[0])] == list(range(1, 52))
        assert await num_sessions(cluster) == 5


async def test_result_of_a_crashed_replica_is_returned_by_another(tmp_path: Path) -> None:
    """It may have begun, or ended, or never have been heard of; the client knows nothing."""
    model = write_tiny_model(tmp_path / "model")
    async with cluster_of(model, num_replicas=2, wires="direct") as cluster:
        first, second = cluster.replicas
        for number, delay_s in enumerate((0.0, 0.03, 0.5)):
            await first.up()
            first.hold()
            asking = [
                asyncio.create_task(generated(first, f"{number} {index}", 300))
                for index in range(8)
            ]
            await asyncio.sleep(delay_s)  # which of them the crash meets is chance
            first.signal(signal.SIGKILL)
            before = await asyncio.gather(*asking)
            after = await asyncio.gather(
                *(generated_in_the_end(second, f"{number} {index}", 300) for index in range(8))
            )
            await first.ended(number)
            for seen, told in zip(before, after, strict=True):
                assert events_of(seen) == events_of(told)[: len(events_of(seen))]
                assert [frame["seq"] for frame in events_of(told)] == list(range(1, 302))
            assert await num_sessions(cluster) == 8 * (number + 1)
            first.release()


async def test_append_runs_once_at_any_replica(tmp_path: Path) -> None:
    async with cluster_of(write_tiny_model(tmp_path / "model"), wires="direct") as cluster:
        async with client_of(cluster.urls()[0]) as client:
            session = (await client.post("/v1/sessions")).json()["session"]
        body = {"text": " The fox." * 50, "idempotency_key": "k"}
        answers = await asyncio.gather(
            *(appended(url, session, body) for url in cluster.urls() for _ in range(3))
        )
        assert len(set(answers)) == 1, answers
        holder, *others = cluster.replicas
        holder.hold()
        holder.signal(signal.SIGKILL)
        await holder.ended(0)
        for replica in others:
            assert await appended(replica.process.url, session, body) == answers[0]
        other = {**body, "idempotency_key": "l"}
        assert await appended(others[0].process.url, session, other) > answers[0]


async def appended(url: str, session: str, body: dict[str, str]) -> int:
    """Asks, and asks again where it is told to; the position after the append."""
    async with asyncio.timeout(TRIES_S), client_of(url) as client:
        while True:
            answer: httpx.Response = await client.post(f"/v1/sessions/{session}/append", json=body)
            found: dict[str, Any] = answer.json()
            if "position" in found:
                return int(found["position"])
            assert found["error"]["code"] in {*NOT_YET, "session_busy"}, found
            await asyncio.sleep(0.05)
