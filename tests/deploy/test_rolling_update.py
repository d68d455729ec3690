"""A rolling update as Kubernetes does it, with processes: streams move, and miss nothing.

Three servers on one PostgreSQL stand behind a balancer. One after the other gets a successor
that is ready first (``maxSurge: 1``, ``maxUnavailable: 0``) and then SIGTERM, while clients read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from clients.python import AsyncClient, Finished
from tests.deploy.balancer import Balancer, balanced
from tests.postgres import Postgres
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess
from tests.reliability.streams import ENDLESS
from tests.tiny import write_model

NUM_REPLICAS = 3
#: With the first successor there is one server for each of them.
NUM_CLIENTS = 4
#: When all clients together have read so many of a turn, the server is told to end.
NUM_TOKENS_BEFORE = 200
#: So many of it each client reads after that.
NUM_TOKENS_AFTER = 200

pytestmark = [
    pytest.mark.slow,
    # It starts eight servers, which takes as long as the machine lets it.
    pytest.mark.timeout(300),
]


class Seen(NamedTuple):
    """What a client got as one event. Ids are not in it: they differ from run to run."""

    seq: int
    position: int
    token_id: int
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


class Reader:
    """A client that continues with one session; of each turn, what it got and how long it was."""

    def __init__(self, client: AsyncClient, seed: int) -> None:
        self.turns: list[list[Seen]] = []
        self.num_tokens: list[int] = []
        self._client, self._seed = client, seed
        self._session: str | None = None

    async def read(
        self, odometer: Odometer, enough: asyncio.Event, max_tokens: int = ENDLESS
    ) -> None:
        """One more turn. It is cancelled when some of it has come after ``enough`` is set."""
        turn, num_left = len(self.turns), NUM_TOKENS_AFTER
        self.turns.append([])
        generation = self._client.generate(
            f" The fox said {turn} times:",
            session=self._session,
            keep=True if self._session is None else None,
            idempotency_key=f"{self._seed}-{turn}",
            seed=1000 * self._seed + turn,
            max_tokens=max_tokens,
            temperature=0.9,
            ignore_eos=True,
        )
        async for event in generation:
            if isinstance(event, Finished):
                break
            self.turns[-1].append(Seen(event.seq, event.position, event.token_id, event.text))
            await odometer.add()
            num_left -= enough.is_set()
            if num_left == 0:
                break
        finished = await generation.cancel()
        assert finished is not None
        self.num_tokens.append(finished.seq - self.turns[-1][0].seq)
        self._session = generation.session


async def test_streams_continue_through_a_rolling_update(
    postgres: Postgres, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    odometer = Odometer()
    with ExitStack() as stack:
        async with balanced() as balancer, AsyncExitStack() as clients:
            servers = Deployment(
                stack, balancer, "--model", model, "--store", postgres.new_database()
            )
            first = await asyncio.gather(*(servers.add() for _ in range(NUM_REPLICAS)))
            readers = [
                Reader(await clients.enter_async_context(AsyncClient(balancer.url)), seed)
                for seed in range(NUM_CLIENTS)
            ]
            for old in first:
                await servers.add()
                async with asyncio.TaskGroup() as group:
                    enough = asyncio.Event()
                    for reader in readers:
                        group.create_task(reader.read(odometer, enough))
                    await servers.replace(old, odometer)
                    enough.set()
            # And once more after the last.
            await asyncio.gather(*(reader.read(odometer, enough) for reader in readers))
        # In turn they began at the first servers and one successor: those at the first came back.
        assert balancer.num_connections >= NUM_CLIENTS + NUM_REPLICAS
    whole = await uninterrupted(model, readers)
    for reader, other in zip(readers, whole, strict=True):
        assert reader.num_tokens == other.num_tokens
        for seen, told in zip(reader.turns, other.turns, strict=True):
            assert len(seen) >= NUM_TOKENS_AFTER
            assert seen == told[: len(seen)]


async def uninterrupted(model: Path, readers: Sequence[Reader]) -> list[Reader]:
    """Those of the same requests at one server to which nothing happens."""
    with ServerProcess("--model", model, "--store", "memory") as server:
        return await asyncio.gather(
            *(again(server.url, reader, n) for n, reader in enumerate(readers))
        )


async def again(url: str, reader: Reader, seed: int) -> Reader:
    """The turns of ``reader``, each with so many tokens as its cancelled one has."""
    async with AsyncClient(url) as client:
        other = Reader(client, seed)
        for num_tokens in reader.num_tokens:
            await other.read(Odometer(), asyncio.Event(), num_tokens)
    return other
