from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from server.errors import InternalFailure
from server.runtime.event_queue import Outbox, ReaderTooSlow


async def test_take_gives_everything_that_waits() -> None:
    outbox: Outbox[int] = Outbox(4)
    outbox.put([1])
    outbox.put([2])
    assert await outbox.take() == [1, 2]


async def test_put_wakes_a_waiting_reader() -> None:
    outbox: Outbox[int] = Outbox(4)
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put([5])
    assert await reader == [5]


async def test_overflow_is_reported_once_and_drops_what_waits() -> None:
    outbox: Outbox[int] = Outbox(2)
    assert [outbox.put([item]) for item in range(4)] == [True, True, False, True]
    assert isinstance(outbox.broken.result(), ReaderTooSlow)
    with pytest.raises(ReaderTooSlow):
        await outbox.take()


async def test_batch_that_does_not_fit_whole_overflows() -> None:
    outbox: Outbox[int] = Outbox(3)
    assert outbox.put([1, 2])
    assert not outbox.put([3, 4])


async def test_failure_reaches_a_waiting_reader_and_the_first_one_counts() -> None:
    outbox: Outbox[int] = Outbox(2)
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.fail(InternalFailure("the engine has stopped"))
    outbox.fail(ReaderTooSlow())
    with pytest.raises(InternalFailure, match="has stopped"):
        await reader


async def test_cancelled_reader_can_read_again() -> None:
    outbox: Outbox[int] = Outbox(2)
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    outbox.put([1])
    assert await outbox.take() == [1]


async def test_shortcut_gets_what_comes_while_the_reader_waits() -> None:
    outbox: Outbox[int] = Outbox(2)
    short: list[int] = []

    def shortcut(items: Sequence[int]) -> bool:
        short.extend(items)
        return True

    outbox.put([1])
    assert await outbox.take(shortcut) == [1]
    outbox.put([2])
    assert await outbox.take(shortcut) == [2]
    reader = asyncio.create_task(outbox.take(shortcut))
    await asyncio.sleep(0)
    assert outbox.put([3, 4, 5])
    assert outbox.put([6])
    assert short == [3, 4, 5, 6]
    assert not reader.done()
    reader.cancel()


async def test_nothing_overtakes_what_the_shortcut_refused() -> None:
    outbox: Outbox[int] = Outbox(10)
    offered: list[Sequence[int]] = []

    def shortcut(items: Sequence[int]) -> bool:
        offered.append(items)
        return len(offered) > 1

    reader = asyncio.create_task(outbox.take(shortcut))
    await asyncio.sleep(0)
    outbox.put([1])
    outbox.put([2])
    assert await reader == [1, 2]
    assert offered == [[1]]


async def test_shortcut_ends_with_its_reader() -> None:
    outbox: Outbox[int] = Outbox(2)
    reader = asyncio.create_task(outbox.take(lambda items: True))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    outbox.put([1])
    assert await outbox.take() == [1]


class Pressure:
    """An outbox of eight, and what it said of its pressure."""

    def __init__(self) -> None:
        self.told: list[bool] = []
        self.outbox: Outbox[int] = Outbox(8, self.told.append)


async def test_half_full_outbox_tells_of_each_item_and_once_that_it_was_read() -> None:
    pressure = Pressure()
    pressure.outbox.put([1, 2, 3])
    assert pressure.told == []
    pressure.outbox.put([4])
    pressure.outbox.put([5])
    assert pressure.told == [True, True]
    assert await pressure.outbox.take() == [1, 2, 3, 4, 5]
    assert pressure.told == [True, True, False]
    pressure.outbox.put([6])
    await pressure.outbox.take()
    assert pressure.told == [True, True, False]


async def test_shortcut_makes_no_pressure() -> None:
    pressure = Pressure()
    reader = asyncio.create_task(pressure.outbox.take(lambda items: True))
    await asyncio.sleep(0)
    pressure.outbox.put([1, 2, 3, 4, 5, 6])
    assert pressure.told == []
    reader.cancel()


async def test_emptied_waits_until_all_is_taken() -> None:
    outbox: Outbox[int] = Outbox(8)
    await outbox.emptied()
    outbox.put([1])
    emptied = asyncio.create_task(outbox.emptied())
    await asyncio.sleep(0)
    assert not emptied.done()
    await outbox.take()
    async with asyncio.timeout(10):
        await emptied


async def test_those_who_wait_for_an_empty_outbox_take_turns() -> None:
    outbox: Outbox[int] = Outbox(8)

    async def add(item: int) -> None:
        await outbox.emptied()
        outbox.put([item])

    outbox.put([0])
    writers = [asyncio.create_task(add(item)) for item in (1, 2, 3)]
    await asyncio.sleep(0)
    assert [await outbox.take() for _ in range(4)] == [[0], [1], [2], [3]]
    await asyncio.gather(*writers)


async def test_broken_outbox_will_not_be_emptied_and_nobody_waits_for_it() -> None:
    outbox: Outbox[int] = Outbox(8)
    outbox.put([1])
    emptied = asyncio.create_task(outbox.emptied())
    await asyncio.sleep(0)
    outbox.fail(InternalFailure("the engine has stopped"))
    async with asyncio.timeout(10):
        await emptied


async def test_what_is_on_its_way_has_room_beyond_the_pressure() -> None:
    told: list[bool] = []
    outbox: Outbox[int] = Outbox(4, told.append, spare=3)
    assert outbox.put([1, 2, 3, 4])
    assert outbox.put([5, 6, 7])
    assert told == [True, True]
    assert not outbox.put([8])
