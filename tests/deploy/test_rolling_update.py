"""A rolling update as Kubernetes does it, with processes: streams move, and miss nothing.

Three servers on one PostgreSQL stand behind a balancer. One after the other gets a successor
that is ready first (``maxSurge: 1``, ``maxUnavailable: 0``) and then SIGTERM, while clients read.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from clients.python import AsyncClient, Finished, Token
from tests.deploy.balancer import Balancer, balanced
from tests.postgres import Postgres, binaries
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess
from tests.reliability.streams import write_tiny_model

NUM_REPLICAS = 3
NUM_CLIENTS = 4
#: Each client continues with its session for every server that ends, and once more after the last.
NUM_TURNS = NUM_REPLICAS + 1
#: Of one turn; when all clients together have read so many of it, the server is told to end.
NUM_TOKENS = 800
NUM_TOKENS_BEFORE = 200

pytestmark = [
    pytest.mark.slow,
    # It starts eight servers, which takes as long as the machine lets it.
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        binaries() is None, reason="no PostgreSQL (Debian: apt-get install postgresql)"
    ),
]


class Seen(NamedTuple):
    """What a client got as one event. Ids are not in it: they differ from run to run."""

    seq: int
    position: int
    token_id: int | None
    text: str


class Deployment:
    """Servers behind ``balancer``, all of one model and one store, until ``stack`` is closed."""

    def __init__(self, stack: ExitStack, balancer: Balancer, *flags: object) -> None:
        self._stack, self._balancer, self._flags = stack, balancer, flags

    async def add(self) -> ServerProcess:
        """One more server; it is asked from when it is ready."""
        server = ServerProcess(*self._flags)
        await asyncio.to_thread(self._stack.enter_context, server)
        self._balancer.upstreams.append(server.port)
        return server

    async def replace(self, old: ServerProcess, odometer: Odometer) -> None:
        """SIGTERM in the middle of streams, with a successor that is already there."""
        port = old.port
        await odometer.reach(odometer.num_tokens + NUM_TOKENS_BEFORE)
        assert await asyncio.to_thread(old.stop) == 0, old.log()
        # Only now: clients that came while it drained were sent away by it.
        self._balancer.upstreams.remove(port)


async def told(
    url: str, seed: int, gates: list[asyncio.Event], odometer: Odometer
) -> list[list[Seen]]:
    """What a client gets that continues with one session whenever the next gate opens."""
    turns: list[list[Seen]] = []
    session = None
    async with AsyncClient(url) as client:
        for turn, gate in enumerate(gates):
            await gate.wait()
            turns.append([])
            generation = client.generate(
                f" The fox said {turn} times:",
                session=session,
                keep=True if session is None else None,
                idempotency_key=f"{seed}-{turn}",
                seed=1000 * seed + turn,
                max_tokens=NUM_TOKENS,
                temperature=0.9,
                ignore_eos=True,
            )
            async for event in generation:
                turns[-1].append(seen(event))
                await odometer.add()
            session = generation.session
    return turns


def seen(event: Token | Finished) -> Seen:
    token_id = event.token_id if isinstance(event, Token) else None
    return Seen(event.seq, event.position, token_id, event.text)


async def test_streams_go_on_through_a_rolling_update(postgres: Postgres, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    gates = [asyncio.Event() for _ in range(NUM_TURNS)]
    odometer = Odometer()
    with ExitStack() as stack:
        async with balanced() as balancer, asyncio.TaskGroup() as group:
            servers = Deployment(
                stack, balancer, "--model", model, "--store", postgres.new_database()
            )
            first = await asyncio.gather(*(servers.add() for _ in range(NUM_REPLICAS)))
            readers = [
                group.create_task(told(balancer.url, seed, gates, odometer))
                for seed in range(NUM_CLIENTS)
            ]
            for old, gate in zip(first, gates, strict=False):
                await servers.add()
                gate.set()
                await servers.replace(old, odometer)
            gates[-1].set()
        # In turn they began at the first servers and one successor: those at the first came back.
        assert balancer.num_connections >= NUM_CLIENTS + NUM_REPLICAS
    transcripts = [reader.result() for reader in readers]
    for turns in transcripts:
        events = [event for turn in turns for event in turn]
        assert [event.seq for event in events] == [*range(1, len(events) + 1)]
    assert transcripts == await uninterrupted(model)


async def uninterrupted(model: Path) -> list[list[list[Seen]]]:
    """The same requests at one server to which nothing happens."""
    gate = asyncio.Event()
    gate.set()
    with ServerProcess("--model", model, "--store", "memory") as server:
        return await asyncio.gather(
            *(told(server.url, seed, [gate] * NUM_TURNS, Odometer()) for seed in range(NUM_CLIENTS))
        )
