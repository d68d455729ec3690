"""Waiting in tests: for a condition that has no event of its own, and for a task to begin."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TypeVar

T = TypeVar("T")

#: After so long a server is stuck. A busy machine may take many seconds for anything.
STUCK_S = 120.0
POLL_S = 0.02


async def eventually(
    condition: Callable[[], T | Awaitable[T]], within_s: float | None = STUCK_S
) -> T:
    """The first value of ``condition`` that is true. For what cannot be awaited.

    The condition may be a coroutine function, or may block: then it runs in a thread.

    Raises:
        TimeoutError: no value was true within ``within_s``, if it is given.
    """
    async with asyncio.timeout(within_s):
        while not (found := await _value_of(condition)):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(POLL_S)
    return found


def wait_until(condition: Callable[[], object], within_s: float = STUCK_S) -> None:
    """Returns when ``condition`` holds, for tests without an event loop. Raises `TimeoutError`."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not so within {within_s:g} s")
        time.sleep(POLL_S)


async def started_task(work: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """A task that has run ``work`` as far as the first place where it waits."""
    (task,) = await started_tasks([work])
    return task


async def started_tasks(works: Iterable[Coroutine[object, object, T]]) -> list[asyncio.Task[T]]:
    """One for each of ``works``, all started in the same iteration of the event loop."""
    tasks = [asyncio.create_task(work) for work in works]
    await asyncio.sleep(0)
    return tasks


async def _value_of(condition: Callable[[], T | Awaitable[T]]) -> T:
    if inspect.iscoroutinefunction(condition):
        return await condition()  # type: ignore[no-any-return]
    return await asyncio.to_thread(condition)  # type: ignore[arg-type]
