"""Work under an idempotency key is done once, whatever leaves or fails meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from server.engine.types import Event
from server.runtime.queues import EventQueue
from server.sessions.sessions import KeyInUse
from server.store.base import StoreFailed
from server.store.postgres.link import REST_S
from tests.postgres import Postgres
from tests.server.cluster.stores import Join
from tests.server.cluster.test_moves import Replica, replicas
from tests.server.running_engine import request


def work(request_id: str = "r") -> Any:
    return request(request_id, 5, keep=True, key="k")


async def leave(submitting: asyncio.Task[Any], at: Replica, event_queue: EventQueue[Event]) -> None:
    """As a client of HTTP does whose patience is over."""
    submitting.cancel()
    with suppress(asyncio.CancelledError):
        await submitting
    at.async_engine.requests.release(event_queue)


@pytest.mark.parametrize("again_at", [0, 1], ids=["the same replica", "another"])
async def test_disconnect_while_the_engine_is_busy_releases_the_key(
    database_url: str, again_at: int
) -> None:
    async with replicas(database_url) as both:
        one, again = both[0], both[again_at]
        step = threading.Event()
        busy = asyncio.create_task(one.async_engine.call(lambda engine, now: step.wait(30)))
        event_queue: EventQueue[Event] = EventQueue(10**6)
        posted = one.async_engine.call
        waits = asyncio.Event()

        async def call(*args: Any, **more: Any) -> Any:
            waits.set()
            return await posted(*args, **more)

        one.async_engine.call = call  # type: ignore[method-assign]
        submitting = asyncio.create_task(one.keys.submit_once(work(), event_queue))
        await waits.wait()
        leaving = asyncio.create_task(leave(submitting, one, event_queue))
        await asyncio.wait([leaving], timeout=0.5)  # it must not end before the engine knows
        with pytest.raises(KeyInUse):
            await again.keys.submit_once(work("again"), EventQueue(10**6))
        step.set()
        await asyncio.gather(busy, leaving)
        found = await again.keys.submit_once(work("again"), EventQueue(10**6))
        assert found is not None
        assert found.request_id == "r"
        assert len(await again.sessions.listed("me", None, 10)) == 1


async def test_disconnect_while_the_key_is_claimed_releases_it(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        claims, may_claim = asyncio.Event(), threading.Event()
        loop, claim = asyncio.get_running_loop(), one.store.claim_key

        def slow_claim(owner: str, key: str) -> bool:
            loop.call_soon_threadsafe(claims.set)
            may_claim.wait(30)
            return claim(owner, key)

        one.store.claim_key = slow_claim  # type: ignore[method-assign]
        event_queue: EventQueue[Event] = EventQueue(10**6)
        submitting = asyncio.create_task(one.keys.submit_once(work(), event_queue))
        await claims.wait()
        leaving = asyncio.create_task(leave(submitting, one, event_queue))
        may_claim.set()
        await leaving
        assert await other.keys.submit_once(work(), EventQueue(10**6)) is None


async def test_commit_that_fails_does_not_keep_the_key(database_url: str) -> None:
    async with replicas(database_url) as (one, other):
        commit = one.store.commit

        def fail(records: Any) -> None:
            one.store.commit = commit  # type: ignore[method-assign]
            raise StoreFailed("away for a moment")

        one.store.commit = fail  # type: ignore[method-assign]
        with pytest.raises(StoreFailed):
            await one.keys.submit_once(work(), EventQueue(10**6))
        assert await other.keys.submit_once(work(), EventQueue(10**6)) is None


def test_key_that_could_not_be_given_back_is_not_while_it_is_used_again(
    join: Join, postgres: Postgres
) -> None:
    one, other = join(), join()
    assert one.claim_key("ann", "k")
    postgres.stop()
    with pytest.raises(StoreFailed):
        one.give_back_key("ann", "k")
    postgres.start()
    time.sleep(REST_S)  # for so long it does not try
    assert one.claim_key("ann", "k")
    one.maintain(1.0)
    assert not other.claim_key("ann", "k")
