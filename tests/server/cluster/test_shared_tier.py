"""Two replicas with real engines, and one prefix cache between them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from server.engine.types import EngineStats
from server.observability.metrics import Metrics
from server.runtime.async_engine import AsyncEngine
from server.sessions.origins import PrefixTier
from server.store.base import Identity
from server.store.postgres.database import PostgresDatabase, connect, migrate
from server.store.postgres.objects import SharedLimits, SharedPrefixes, TableObjects
from server.store.sqlite.store import MemoryStore
from tests.server.running_engine import begun, collect
from tests.tiny import request, solo, tiny_checkpoint, tiny_engine, tokens_of

SCHEMA = "everstream_test"
PROMPT = tuple(10 + n % 200 for n in range(300))


class Replica:
    def __init__(self, async_engine: AsyncEngine, tier: PrefixTier) -> None:
        self._async_engine, self._tier = async_engine, tier

    async def generate(self, request_id: str, owner: str) -> list[int]:
        asked = request(request_id, PROMPT, owner=owner)
        await self._tier.fetch(asked)
        event_queue = await begun(self._async_engine, asked, 100)
        return tokens_of(await collect(event_queue))

    async def stats(self) -> EngineStats:
        await self._async_engine.stats()
        return await self._async_engine.stats()


@pytest.fixture
def new_prefixes(database_url: str) -> Callable[[], SharedPrefixes]:
    database = PostgresDatabase(database_url, SCHEMA, is_full=False)
    migrate(database)
    database.close()
    state_bytes = tiny_engine().stats().state_bytes_per_session
    return partial(
        SharedPrefixes,
        lambda: connect(database_url),
        SCHEMA,
        TableObjects,
        Identity("tiny", "tokenizer", "torch", "float32", state_bytes, "layout"),
        SharedLimits(max_bytes=10**9, min_tokens=128),
        time.monotonic,
    )


@asynccontextmanager
async def replica(prefixes: SharedPrefixes) -> AsyncIterator[Replica]:
    """When it is left, all that it had to share is there."""
    engine = tiny_engine(max_prefixes=64, max_evicted_prefixes=64)
    async_engine = AsyncEngine(engine, time.monotonic, Metrics(), MemoryStore())
    await async_engine.start()
    bos = tiny_checkpoint().config.bos_token_id
    tier = PrefixTier(async_engine, prefixes, bos, at_end=prefixes.close)
    yield Replica(async_engine, tier)
    assert await async_engine.stop()
    tier.close()


async def test_replica_uses_the_prefix_of_another(
    new_prefixes: Callable[[], SharedPrefixes],
) -> None:
    expected = tokens_of(solo(tiny_engine(), request("r", PROMPT)))
    async with replica(new_prefixes()) as one:
        assert await one.generate("a", "me") == expected
        assert (await one.stats()).prefix_hits_total == 0
    shared = new_prefixes()
    async with replica(shared) as other:
        assert await other.generate("b", "me") == expected  # to the bit
        stats = await other.stats()
        assert shared.num_hits == stats.prefix_hits_total == 1
        assert stats.prefix_saved_tokens_total == 256
        assert await other.generate("c", "me") == expected
        assert shared.num_hits == 1  # memory has it
        assert (await other.stats()).prefix_hits_total == 2


async def test_one_tenant_finds_nothing_of_another_at_any_replica(
    new_prefixes: Callable[[], SharedPrefixes],
) -> None:
    async with replica(new_prefixes()) as one:
        await one.generate("a", "me")
    shared = new_prefixes()
    async with replica(shared) as other:
        await other.generate("b", "you")
        stats = await other.stats()
        assert stats.prefix_hits_total == stats.prefix_saved_tokens_total == shared.num_hits == 0
        await other.generate("c", "me")
        assert shared.num_hits == (await other.stats()).prefix_hits_total == 1
