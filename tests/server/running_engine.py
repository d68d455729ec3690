"""An async engine at work over the fake engine, and what tests ask of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from server.engine.types import EngineStats, Event, Finished, Request, SamplingParams, SessionInfo
from server.observability.metrics import Metrics
from server.runtime.async_engine import AsyncEngine
from server.runtime.queues import EventQueue
from server.sessions.sessions import Sessions
from server.store.base import Store
from server.store.sqlite.store import MemoryStore
from tests.fakes import FakeEngine
from tests.reliability.servers import STUCK_S
from tests.server.harness import Gate


class HereAndNow:
    """Stands for an event loop: what is to be called in it soon, the calling thread calls."""

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        call()


@asynccontextmanager
async def driving(
    engine: FakeEngine,
    gate: Gate | None = None,
    clock: list[float] | None = None,
    store: Store | None = None,
) -> AsyncIterator[AsyncEngine]:
    read = time.monotonic if clock is None else lambda: clock[0]
    async_engine = AsyncEngine(engine, read, Metrics(), store or MemoryStore())
    await async_engine.start()
    yield async_engine
    if gate is not None:
        gate.open()
    assert await async_engine.stop(STUCK_S)


def request(
    request_id: str = "r", max_tokens: int = 5, prompt: str = "hi", **more: object
) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id, "me", tuple(prompt.encode()), params, **more)  # type: ignore[arg-type]


async def submit(async_engine: AsyncEngine, work: Request, sink: EventQueue[Event]) -> None:
    await Sessions(async_engine).submit(work, sink)


async def begun(
    at: Sessions | AsyncEngine, work: Request, max_items: int = 10**6
) -> EventQueue[Event]:
    """The events of ``work``, which has been accepted."""
    event_queue: EventQueue[Event] = EventQueue(max_items)
    sessions = at if isinstance(at, Sessions) else Sessions(at)
    await sessions.submit(work, event_queue)
    return event_queue


async def run(at: Sessions | AsyncEngine, work: Request) -> list[Event]:
    """All events of ``work``."""
    return await collect(await begun(at, work))


async def create(async_engine: AsyncEngine) -> SessionInfo:
    return await async_engine.call(lambda engine, now: engine.kept.create("me", now), work=True)


async def info(async_engine: AsyncEngine, session: str) -> SessionInfo:
    return await async_engine.call(lambda engine, now: engine.kept.info(session, "me", now))


async def settled(async_engine: AsyncEngine) -> EngineStats:
    """The counts after the step that obeys what has been told: the first answer waits for it."""
    await async_engine.stats()
    return await async_engine.stats()


async def collect(event_queue: EventQueue[Event]) -> list[Event]:
    events: list[Event] = []
    while not events or not isinstance(events[-1], Finished):
        events += await event_queue.take()
    return events


async def until(async_engine: AsyncEngine, holds: Callable[[EngineStats], bool]) -> EngineStats:
    """The engine's counts as soon as ``holds`` of them."""
    async with asyncio.timeout(STUCK_S):
        while not holds(stats := await async_engine.stats()):
            pass
    return stats
