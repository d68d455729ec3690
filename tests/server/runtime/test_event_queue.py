from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from server.errors import InternalFailure
from server.runtime.queues import EventQueue, ReaderTooSlow
from tests.waiting import started_task, started_tasks


async def waiting(
    event_queue: EventQueue[int], direct_write: Callable[[Sequence[int]], bool] | None = None
) -> asyncio.Task[list[int]]:
    """A reader that waits for items."""
    return await started_task(event_queue.take(direct_write))


async def test_take_returns_everything_queued() -> None:
    event_queue: EventQueue[int] = EventQueue(4)
    event_queue.put([1])
    event_queue.put([2])
    assert await event_queue.take() == [1, 2]


async def test_put_wakes_a_waiting_reader() -> None:
    event_queue: EventQueue[int] = EventQueue(4)
    reader = await waiting(event_queue)
    event_queue.put([5])
    assert await reader == [5]


async def test_overflow_is_reported_once_and_drops_what_waits() -> None:
    event_queue: EventQueue[int] = EventQueue(2)
    assert [event_queue.put([item]) for item in range(4)] == [True, True, False, True]
    assert isinstance(event_queue.broken.result(), ReaderTooSlow)
    with pytest.raises(ReaderTooSlow):
        await event_queue.take()


async def test_batch_that_does_not_fit_whole_overflows() -> None:
    event_queue: EventQueue[int] = EventQueue(3)
    assert event_queue.put([1, 2])
    assert not event_queue.put([3, 4])


async def test_failure_reaches_a_waiting_reader_and_the_first_one_counts() -> None:
    event_queue: EventQueue[int] = EventQueue(2)
    reader = await waiting(event_queue)
    event_queue.fail(InternalFailure("the engine has stopped"))
    event_queue.fail(ReaderTooSlow())
    with pytest.raises(InternalFailure, match="has stopped"):
        await reader


async def test_cancelled_reader_can_read_again() -> None:
    event_queue: EventQueue[int] = EventQueue(2)
    reader = await waiting(event_queue)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    event_queue.put([1])
    assert await event_queue.take() == [1]


async def test_direct_write_gets_what_comes_while_the_reader_waits() -> None:
    event_queue: EventQueue[int] = EventQueue(2)
    short: list[int] = []

    def direct_write(items: Sequence[int]) -> bool:
        short.extend(items)
        return True

    event_queue.put([1])
    assert await event_queue.take(direct_write) == [1]
    event_queue.put([2])
    assert await event_queue.take(direct_write) == [2]
    reader = await waiting(event_queue, direct_write)
    assert event_queue.put([3, 4, 5])
    assert event_queue.put([6])
    assert short == [3, 4, 5, 6]
    assert not reader.done()
    reader.cancel()


async def test_refused_direct_writes_stay_in_order() -> None:
    event_queue: EventQueue[int] = EventQueue(10)
    offered: list[Sequence[int]] = []

    def direct_write(items: Sequence[int]) -> bool:
        offered.append(items)
        return len(offered) > 1

    reader = await waiting(event_queue, direct_write)
    event_queue.put([1])
    event_queue.put([2])
    assert await reader == [1, 2]
    assert offered == [[1]]


async def test_direct_write_ends_with_its_reader() -> None:
    event_queue: EventQueue[int] = EventQueue(2)
    reader = await waiting(event_queue, lambda items: True)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    event_queue.put([1])
    assert await event_queue.take() == [1]


async def test_half_full_queue_reports_each_item_and_once_that_it_was_read() -> None:
    told: list[bool] = []
    event_queue: EventQueue[int] = EventQueue(8, told.append)
    event_queue.put([1, 2, 3])
    assert told == []
    event_queue.put([4])
    event_queue.put([5])
    assert told == [True, True]
    assert await event_queue.take() == [1, 2, 3, 4, 5]
    assert told == [True, True, False]
    event_queue.put([6])
    await event_queue.take()
    assert told == [True, True, False]


async def test_direct_write_makes_no_backpressure() -> None:
    told: list[bool] = []
    event_queue: EventQueue[int] = EventQueue(8, told.append)
    reader = await waiting(event_queue, lambda items: True)
    event_queue.put([1, 2, 3, 4, 5, 6])
    assert told == []
    reader.cancel()


async def test_emptied_waits_until_all_is_taken() -> None:
    event_queue: EventQueue[int] = EventQueue(8)
    await event_queue.emptied()
    event_queue.put([1])
    emptied = await started_task(event_queue.emptied())
    assert not emptied.done()
    await event_queue.take()
    async with asyncio.timeout(60):
        await emptied


async def test_waiters_for_an_empty_queue_take_turns() -> None:
    event_queue: EventQueue[int] = EventQueue(8)

    async def add(item: int) -> None:
        await event_queue.emptied()
        event_queue.put([item])

    event_queue.put([0])
    writers = await started_tasks(add(item) for item in (1, 2, 3))
    assert [await event_queue.take() for _ in range(4)] == [[0], [1], [2], [3]]
    await asyncio.gather(*writers)


async def test_failed_queue_ends_a_wait_for_emptied() -> None:
    event_queue: EventQueue[int] = EventQueue(8)
    event_queue.put([1])
    emptied = await started_task(event_queue.emptied())
    event_queue.fail(InternalFailure("the engine has stopped"))
    async with asyncio.timeout(60):
        await emptied


async def test_spare_capacity_holds_events_after_backpressure() -> None:
    told: list[bool] = []
    event_queue: EventQueue[int] = EventQueue(4, told.append, spare=3)
    assert event_queue.put([1, 2, 3, 4])
    assert event_queue.put([5, 6, 7])
    assert told == [True, True]
    assert not event_queue.put([8])


async def test_nudged_reader_gets_nothing_or_what_came_just_then() -> None:
    event_queue: EventQueue[int] = EventQueue(8)
    event_queue.nudge()  # without effect where no reader waits
    for items in ([], [1]):
        taking = await started_task(event_queue.take())
        event_queue.nudge()
        event_queue.put(items)
        assert await taking == items
