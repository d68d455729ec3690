from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from server.engine.errors import InternalFailure
from server.outbox import Outbox, ReaderTooSlow


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
