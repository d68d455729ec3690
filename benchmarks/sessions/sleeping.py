"""Very many sessions asleep on the disk, under a model so small that their states fit there."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from benchmarks.decode.shapes import Size
from benchmarks.machine import resident_bytes
from benchmarks.process import ServerProcess
from benchmarks.serve.processes import text_checkpoint
from benchmarks.sessions.report import Row, times
from benchmarks.sessions.server import first_token_s
from clients.python import AsyncClient, Client

SIZE = Size("least", 512, 32, 1, 1, 96, head_dim=32)
FORKS_AT_ONCE = 1000
AT_ONCE = 32
NUM_WOKEN = 200


def measure(folder: Path, num_sessions: int) -> list[Row]:
    """Memory, disk, a restart, and how long some of them take to wake."""
    model = str(text_checkpoint(folder, SIZE, "gated"))
    # Relaxed, because it is not the disk's syncing that this is about.
    options = ["--model", model, "--threads", "1", "--max-sessions", "256", "--sleep-memory", "0"]
    options += ["--store", str(folder / "sleeping"), "--durability", "relaxed"]
    with ServerProcess(*options) as server:
        empty = resident_bytes(server.pid)
        start = time.perf_counter()
        ids = asyncio.run(make(server.url, num_sessions))
        made_s = time.perf_counter() - start
        full = resident_bytes(server.pid)
        server.stop()
    stored = sum(f.stat().st_size for f in (folder / "sleeping").rglob("*") if f.is_file())
    start = time.perf_counter()
    with ServerProcess(*options) as server, Client(server.url) as client:
        ready_s = time.perf_counter() - start
        restarted = resident_bytes(server.pid)
        woken = random.Random(0).sample(ids, min(NUM_WOKEN, num_sessions))
        wakes = [first_token_s(client.session(id)) for id in woken]
    return [
        Row("sessions", num_sessions, ""),
        Row("made and fed", round(num_sessions / made_s, 1), "sessions/s"),
        Row("memory of each, while being made", round((full - empty) / num_sessions, 1), "bytes"),
        Row("memory of each, restarted", round((restarted - empty) / num_sessions, 1), "bytes"),
        Row("disk of each", round(stored / num_sessions, 1), "bytes"),
        Row("ready after a restart", round(ready_s, 3), "s"),
        times("first token of one of them", wakes),
    ]


async def make(url: str, num_sessions: int) -> list[str]:
    """Forks of one session, each fed something of its own, so that it has its own state."""
    room = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(url, timeout_s=600) as client:
        first = await client.create_session()
        await first.append(range(300, 308))
        ids = [first.id]

        async def feed(id: str, number: int) -> None:
            async with room:
                await client.session(id).append([300 + number % 200, 300 + number // 200 % 200])

        while len(ids) < num_sessions:
            forks = await first.fork(min(FORKS_AT_ONCE, num_sessions - len(ids)))
            ids += [fork.id for fork in forks]
            numbers = range(len(ids) - len(forks), len(ids))
            await asyncio.gather(*(feed(ids[number], number) for number in numbers))
        return ids
