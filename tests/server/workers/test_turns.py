"""So many at a time: owners in turn, however often each has asked."""

from __future__ import annotations

import asyncio

import pytest

from server.workers.process import TooManyWait, Turns
from tests.waiting import started_tasks


async def asked(turns: Turns, owner: str, order: list[str], go: asyncio.Event) -> None:
    async with turns.turn(owner):
        order.append(owner)
        await go.wait()


async def start(
    turns: Turns, owners: str, order: list[str], go: asyncio.Event
) -> list[asyncio.Task[None]]:
    return await started_tasks(asked(turns, owner, order, go) for owner in owners)


async def test_owners_take_turns() -> None:
    order: list[str] = []
    go, turns = asyncio.Event(), Turns(8)
    tasks = await start(turns, "aaaaabbc", order, go)
    go.set()
    await asyncio.gather(*tasks)
    assert "".join(order) == "aabcabaa"


async def test_several_have_a_turn_at_the_same_time() -> None:
    order: list[str] = []
    go, turns = asyncio.Event(), Turns(8, num_at_once=2)
    tasks = await start(turns, "aaab", order, go)
    assert order == ["a", "a"]
    go.set()
    await asyncio.gather(*tasks)
    assert sorted(order) == ["a", "a", "a", "b"]
    go.clear()
    tasks = await start(turns, "aaa", order, go)
    assert len(order) == 6
    go.set()
    await asyncio.gather(*tasks)


async def test_one_owner_that_has_too_many_does_not_fill_the_others_place() -> None:
    order: list[str] = []
    go, turns = asyncio.Event(), Turns(2)
    tasks = await start(turns, "aaaabb", order, go)
    go.set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends[2:4]] == [TooManyWait, TooManyWait]
    assert sorted(order) == ["a", "a", "b", "b"]
    async with turns.turn("a"):
        pass


@pytest.mark.parametrize("leaving", range(4))
async def test_cancelled_one_passes_its_turn_to_the_next(leaving: int) -> None:
    order: list[str] = []
    go, turns = asyncio.Event(), Turns(8)
    tasks = await start(turns, "abcd", order, go)
    tasks[leaving].cancel()
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set("abcd") - set(order) <= {"abcd"[leaving]}
    async with turns.turn("e"):
        order.append("e")
    assert order[-1] == "e"


async def test_cancel_as_the_turn_begins_passes_it_on() -> None:
    order: list[str] = []
    go, turns = asyncio.Event(), Turns(8)
    async with turns.turn("a"):
        second, third = await start(turns, "bc", order, go)
    second.cancel()  # its turn has come, and it has not heard of it yet
    go.set()
    await asyncio.gather(second, third, return_exceptions=True)
    assert order == ["c"]
