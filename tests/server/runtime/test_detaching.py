"""Readers of the driver that are slow, leave, come back, and take over from each other."""

from __future__ import annotations

import asyncio

import pytest

from server.engine.types import Event, Failed, Finished, SessionInfo, Started, TokenEvent
from server.errors import SessionAttached
from server.runtime.async_engine import Draining, Driver
from server.runtime.event_queue import Outbox
from tests.fakes import FakeEngine
from tests.server.driving import collect, create, driving, info, request, settled, until
from tests.server.harness import Gate


async def test_reader_that_does_not_keep_up_parks_alone_and_goes_on_where_it_was() -> None:
    async with driving(FakeEngine()) as driver:

        def press(full: bool) -> None:
            (driver.hold if full else driver.go_on)(slow)

        slow: Outbox[Event] = Outbox(200, press)

        quick: Outbox[Event] = Outbox(1000)
        await driver.submit(request("slow", 500), slow)
        await until(driver, lambda stats: stats.num_parked == 1)
        await driver.submit(request("quick", 100), quick)
        assert [e.seq for e in await collect(quick) if isinstance(e, TokenEvent)][-1] == 100
        assert (await driver.stats()).num_parked == 1
        events = await collect(slow)
    assert [e.seq for e in events if isinstance(e, TokenEvent)] == list(range(1, 501))


async def test_parked_request_of_a_reader_that_leaves_is_cancelled() -> None:
    async with driving(FakeEngine()) as driver:
        outbox: Outbox[Event] = Outbox(200, lambda full: driver.hold(outbox))
        await driver.submit(request(max_tokens=10**6), outbox)
        await until(driver, lambda stats: stats.num_parked == 1)
        driver.release(outbox)
        stats = await settled(driver)
        assert (stats.held_slots, stats.num_parked) == (0, 0)


async def test_kept_session_goes_on_without_its_reader_up_to_the_bound() -> None:
    async with driving(FakeEngine(max_detached_tokens=30)) as driver:
        outbox: Outbox[Event] = Outbox(10**6)
        await driver.submit(request(max_tokens=10**6, keep=True), outbox)
        (first, *_) = await outbox.take()
        assert isinstance(first, Started)
        driver.release(outbox)
        await driver.drained()
        await until(driver, lambda stats: stats.num_parked == 1)
        found = await info(driver, first.session)
        assert found.busy
        assert found.parked
        total = (await driver.stats()).completion_tokens_total
        assert found.seq == total >= 30


async def test_request_left_while_its_reader_was_slow_stays_within_the_bound() -> None:
    async with driving(FakeEngine(max_detached_tokens=0)) as driver:
        outbox: Outbox[Event] = Outbox(100, lambda full: driver.hold(outbox))
        await driver.submit(request(max_tokens=10**6, keep=True), outbox)
        await until(driver, lambda stats: stats.num_parked == 1)
        driver.detach("r")
        stats = await settled(driver)
        await settled(driver)
        parked = await until(driver, lambda stats: stats.num_parked == 1)
        driver.go_on(outbox)
        await settled(driver)
        assert await settled(driver) == parked
        assert parked.completion_tokens_total <= stats.completion_tokens_total + 1


class Resuming:
    """A driver whose engine runs a session that nobody reads."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.session = ""
        self.outbox: Outbox[Event] = Outbox(10**6)

    async def begin(self, max_tokens: int = 10**6) -> None:
        left: Outbox[Event] = Outbox(10**6)
        await self.driver.submit(request("left", max_tokens, keep=True), left)
        first = (await left.take())[0]
        assert isinstance(first, Started)
        self.session = first.session
        self.driver.release(left)

    async def attach(self, request_id: str = "new", take_over: bool = False) -> SessionInfo:
        return await self.driver.attach(self.session, "me", request_id, self.outbox, take_over)


async def test_attached_session_rests_until_its_reader_has_caught_up() -> None:
    async with driving(FakeEngine()) as driver:
        resuming = Resuming(driver)
        await resuming.begin()
        attached = await resuming.attach()
        assert attached.busy
        assert attached.parked
        await settled(driver)
        assert (await info(driver, resuming.session)).seq == attached.seq
        driver.caught_up("new")
        event = (await resuming.outbox.take())[0]
        assert isinstance(event, TokenEvent)
        assert (event.request_id, event.seq) == ("new", attached.seq + 1)
        driver.cancel("new")


async def test_end_of_a_session_comes_after_what_its_reader_has_missed() -> None:
    async with driving(FakeEngine()) as driver:
        resuming = Resuming(driver)
        await resuming.begin()
        attached = await resuming.attach()
        driver.cancel("new")
        await settled(driver)
        resuming.outbox.put([Started("missed", "s", 0)])  # what is read from the log
        driver.caught_up("new")
        missed, end = await resuming.outbox.take()
        assert missed.request_id == "missed"
        assert isinstance(end, Finished)
        assert (end.seq, end.finish_reason) == (attached.seq + 1, "cancelled")


async def test_pressure_does_not_start_a_session_whose_reader_is_behind() -> None:
    async with driving(FakeEngine()) as driver:
        resuming = Resuming(driver)
        await resuming.begin()
        attached = await resuming.attach()
        driver.hold(resuming.outbox)
        driver.go_on(resuming.outbox)
        await settled(driver)
        assert (await info(driver, resuming.session)).seq == attached.seq
        driver.hold(resuming.outbox)
        driver.caught_up("new")
        await settled(driver)
        assert (await info(driver, resuming.session)).seq == attached.seq
        driver.go_on(resuming.outbox)
        assert (await resuming.outbox.take())[0].request_id == "new"
        driver.cancel("new")


async def test_second_reader_is_refused_unless_it_takes_over() -> None:
    async with driving(FakeEngine()) as driver:
        resuming = Resuming(driver)
        await resuming.begin()
        await resuming.attach("first")
        driver.caught_up("first")
        with pytest.raises(SessionAttached):
            await resuming.attach("second")
        old, resuming.outbox = resuming.outbox, Outbox(10**6)
        await resuming.attach("second", take_over=True)
        while not isinstance(last := (await old.take())[-1], Failed):
            pass
        assert isinstance(last.error, SessionAttached)
        driver.release(old)
        driver.caught_up("second")
        assert (await resuming.outbox.take())[0].request_id == "second"


async def test_cancel_and_a_take_over_at_once_end_the_session_for_its_new_reader() -> None:
    async with driving(FakeEngine()) as driver:
        resuming = Resuming(driver)
        await resuming.begin()
        await resuming.attach("first")
        driver.cancel("first")
        await resuming.attach("second", take_over=True)
        driver.caught_up("second")
        events = [e for e in await collect(resuming.outbox) if e.request_id == "second"]
        assert isinstance(events[-1], Finished)
        assert events[-1].finish_reason == "cancelled"
        assert (await settled(driver)).num_running == 0
        assert driver.healthy


async def test_reader_that_leaves_before_it_is_attached_leaves_nothing_behind() -> None:
    gate = Gate()
    async with driving(FakeEngine(before_step=gate), gate) as driver:
        resuming = Resuming(driver)
        beginning = asyncio.create_task(resuming.begin())
        gate.allow(2)
        await beginning
        attaching = asyncio.create_task(resuming.attach("first"))
        await asyncio.sleep(0)
        attaching.cancel()
        driver.release(resuming.outbox)
        gate.open()
        await asyncio.gather(attaching, return_exceptions=True)
        await settled(driver)
        async with asyncio.timeout(10):
            await driver.drained()
        assert (await resuming.attach("second")).busy


async def test_idle_session_has_nothing_to_attach_to() -> None:
    async with driving(FakeEngine()) as driver:
        created = await create(driver)
        outbox: Outbox[Event] = Outbox(10)
        attached = await driver.attach(created.session, "me", "r", outbox, False)
        assert not attached.busy
        driver.caught_up("r")
        async with asyncio.timeout(60):
            await driver.drained()


async def test_resume_is_refused_by_a_server_that_drains() -> None:
    async with driving(FakeEngine()) as driver:
        resuming = Resuming(driver)
        await resuming.begin()
        driver.begin_drain()
        with pytest.raises(Draining):
            await resuming.attach()
