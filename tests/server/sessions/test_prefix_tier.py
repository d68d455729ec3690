"""The second tier of the prefix cache, between an async engine and a place that a test controls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from server.engine.prefixes import Evicted, Prefix, PrefixHandle, keys
from server.engine.session import StateBlock
from server.engine.types import Request, SamplingParams
from server.sessions.origins import MAX_UNWRITTEN, PrefixTier
from tests.fakes import EOS, STATE_BYTES, FakeEngine
from tests.server.running_engine import driving, run, until
from tests.waiting import started_task

PREFIXES: dict[str, Any] = {"max_prefixes": 64, "max_evicted_prefixes": 64}
TEXT = tuple(range(1, 201))
BLOCK = StateBlock(np.zeros(STATE_BYTES, np.uint8))
HIT = Prefix(next(keys("me", TEXT, (128,))), 128, BLOCK, 128, TEXT[:128])


class FakePrefixes:
    """Has what ``hits`` says; waits before each call until the test opens ``gate``."""

    def __init__(self) -> None:
        self.hits: dict[str, Prefix] = {}
        self.calls: list[str] = []
        self.put_entries: list[Evicted] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: OSError | None = None
        self.may_have = True

    def put(self, evicted: Sequence[Evicted]) -> None:
        self._call("put")
        if self.error is not None:
            raise self.error
        self.put_entries += evicted

    def find(self, owner: str, tokens: Sequence[int], origin: str = "") -> Prefix | None:
        self._call(f"find {owner}")
        return self.hits.get(owner)

    def named(self, owner: str, key: bytes) -> Prefix | None:
        self._call(f"named {owner}")
        return self.hits.get(owner) if key == HIT.key else None

    def may_find(self, owner: str, tokens: Sequence[int], origin: str = "") -> bool:
        return self.may_have

    def may_name(self, owner: str, key: bytes) -> bool:
        return self.may_have

    def _call(self, name: str) -> None:
        self.entered.set()
        assert self.gate.wait(60)
        self.calls.append(name)


def request(id: str = "r", owner: str = "me", tokens: tuple[int, ...] = TEXT) -> Request:
    return Request(id, owner, tokens, SamplingParams(max_tokens=1), start=False)


def entry(token: int, kept: bool = False) -> Evicted:
    (key,) = keys("me", (token,), (1,))
    return Evicted("me", Prefix(key, 1, BLOCK, 1, (token,)), kept)


async def test_found_state_is_loaded_into_the_engine() -> None:
    prefixes = FakePrefixes()
    prefixes.hits["me"] = HIT
    async with driving(FakeEngine(**PREFIXES)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        await tier.fetch(request())
        await tier.fetch(request(owner="you"))
        assert (await async_engine.stats()).prefix_entries == 1
        tier.close()
    assert prefixes.calls == ["find me", "find you"]


async def test_named_state_is_loaded_into_the_engine_however_short_the_rest_is() -> None:
    prefixes = FakePrefixes()
    prefixes.hits["me"] = HIT
    async with driving(FakeEngine(**PREFIXES)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        named = str(PrefixHandle(HIT.key, (7,)))
        for owner in ("you", "me"):
            await tier.fetch(replace(request(owner=owner, tokens=()), prefix=named))
        assert (await async_engine.stats()).prefix_entries == 1
        tier.close()
    assert prefixes.calls == ["named you", "named me"]


async def test_short_texts_and_kept_sessions_are_not_looked_for() -> None:
    prefixes = FakePrefixes()
    async with driving(FakeEngine(**PREFIXES)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        await tier.fetch(request(tokens=TEXT[:127]))
        await tier.fetch(Request("r", "me", TEXT, None, session="s"))
        tier.close()
    assert prefixes.calls == []


async def test_what_is_certainly_not_there_is_looked_for_behind_writes_alone() -> None:
    prefixes = FakePrefixes()
    prefixes.may_have = False
    prefixes.gate.clear()
    named = replace(request(tokens=()), prefix=str(PrefixHandle(HIT.key, (7,))))
    async with driving(FakeEngine(**PREFIXES)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        await tier.fetch(request())
        await tier.fetch(named)
        assert not prefixes.entered.is_set()
        async_engine.on_evicted_prefixes([entry(1)])
        fetching = [await started_task(tier.fetch(each)) for each in (request(), named)]
        prefixes.gate.set()
        await asyncio.gather(*fetching)
        assert prefixes.calls == ["put", "find me", "named me"]
        await tier.fetch(request())
        await tier.fetch(named)
        tier.close()
    assert prefixes.calls == ["put", "find me", "named me"]


@pytest.mark.parametrize(("min_uses", "num_prompts"), [(1, 1), (3, 3)])
async def test_state_is_written_at_the_use_that_the_engine_is_told(
    min_uses: int, num_prompts: int
) -> None:
    prefixes = FakePrefixes()
    async with driving(FakeEngine(**PREFIXES, min_prefix_uses=min_uses)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        for number in range(num_prompts):
            await async_engine.stats()
            assert prefixes.put_entries == []
            await run(async_engine, request(f"r{number}"))
        await async_engine.stats()
        tier.close()
    written = {199} if min_uses > 1 else {128, 199}
    assert {e.prefix.num_tokens for e in prefixes.put_entries} == written
    assert all(e.kept for e in prefixes.put_entries)


async def test_tier_learns_which_states_have_left_memory() -> None:
    prefixes = FakePrefixes()
    async with driving(FakeEngine(max_prefixes=1, max_evicted_prefixes=64)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        await run(async_engine, request())
        await async_engine.stats()
        tier.close()
    found = [(e.prefix.num_tokens, e.kept) for e in prefixes.put_entries]
    assert found == [(128, True), (199, True), (128, False)]


async def test_states_in_memory_are_saved_at_the_end_the_most_useful_last() -> None:
    """Short ones are not: no request looks for them in the tier."""
    prefixes = FakePrefixes()
    async with driving(FakeEngine(**PREFIXES, min_prefix_uses=9)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        await run(async_engine, request("a", tokens=TEXT[:100]))
        await run(async_engine, request("b"))
        await run(async_engine, request("c", tokens=TEXT[:150]))
        await tier.save()
        assert prefixes.put_entries == []
        tier.close()
    assert [e.prefix.num_tokens for e in prefixes.put_entries] == [149, 199, 128]


async def test_saved_bytes_are_bounded_and_the_most_useful_are_kept() -> None:
    prefixes = FakePrefixes()
    async with driving(FakeEngine(**PREFIXES, min_prefix_uses=9)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS, max_saved_bytes=2 * STATE_BYTES - 1)
        await run(async_engine, request())
        await tier.save()
        tier.close()
    assert [e.prefix.num_tokens for e in prefixes.put_entries] == [199]


async def test_nothing_is_asked_of_an_engine_that_has_stopped() -> None:
    prefixes = FakePrefixes()
    async with driving(FakeEngine(**PREFIXES, min_prefix_uses=9)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        await run(async_engine, request())
    await tier.save()
    tier.close()
    assert prefixes.put_entries == []


async def test_hanging_tier_delays_one_request_for_its_timeout() -> None:
    prefixes = FakePrefixes()
    prefixes.hits["me"] = HIT
    async with driving(FakeEngine(**PREFIXES)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS, timeout_s=0.01)
        prefixes.gate.clear()
        async with asyncio.timeout(60):
            await tier.fetch(request())
            for _ in range(5):
                await tier.fetch(request(owner="you"))
        assert (await async_engine.stats()).prefix_entries == 0
        prefixes.gate.set()
        await until(async_engine, lambda stats: stats.prefix_entries == 1)  # of use to the next one
        tier.close()
    assert "find you" not in prefixes.calls


async def test_prompt_does_not_wait_for_all_that_is_written() -> None:
    prefixes = FakePrefixes()
    async with driving(FakeEngine(**PREFIXES)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        prefixes.gate.clear()
        async_engine.on_evicted_prefixes([entry(token, kept=True) for token in range(10)])
        assert await asyncio.to_thread(prefixes.entered.wait, 60)
        fetching = await started_task(tier.fetch(request()))
        prefixes.gate.set()
        await fetching
        tier.close()
    assert prefixes.calls.index("find me") == 1
    assert len(prefixes.put_entries) == 10


async def test_pending_writes_are_bounded() -> None:
    prefixes = FakePrefixes()
    async with driving(FakeEngine(**PREFIXES)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        prefixes.gate.clear()
        async_engine.on_evicted_prefixes([entry(0)])
        assert await asyncio.to_thread(prefixes.entered.wait, 60)
        last = [entry(token) for token in range(1, MAX_UNWRITTEN + 6)]
        async_engine.on_evicted_prefixes(last)
        prefixes.gate.set()
        tier.close()
    assert prefixes.put_entries == [entry(0), *last[-MAX_UNWRITTEN:]]


async def test_what_cannot_be_written_is_lost_alone(caplog: pytest.LogCaptureFixture) -> None:
    prefixes = FakePrefixes()
    prefixes.error = OSError("no room")
    async with driving(FakeEngine(**PREFIXES)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        async_engine.on_evicted_prefixes([entry(1), entry(2)])
        tier.close()
    assert prefixes.calls == ["put", "put"]
    assert "no room" in caplog.text


async def test_request_that_is_gone_leaves_its_state_to_others() -> None:
    prefixes = FakePrefixes()
    prefixes.hits["me"] = HIT
    async with driving(FakeEngine(**PREFIXES)) as async_engine:
        tier = PrefixTier(async_engine, prefixes, EOS)
        prefixes.gate.clear()
        fetching = asyncio.create_task(tier.fetch(request()))
        assert await asyncio.to_thread(prefixes.entered.wait, 60)
        fetching.cancel()
        await asyncio.wait([fetching])
        prefixes.gate.set()
        await until(async_engine, lambda stats: stats.prefix_entries == 1)
        tier.close()
