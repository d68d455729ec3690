from __future__ import annotations

import asyncio
import threading

import pytest

from server.engine.types import (
    Event,
    Finished,
    Started,
    TokenEvent,
)
from server.errors import (
    CapacityExhausted,
    InternalFailure,
    InvalidRequest,
    QueueFull,
    SessionNotFound,
)
from server.observability.metrics import Scrape, render
from server.runtime.async_engine import STALL_S, Draining
from server.runtime.engine_thread import MAX_COMMANDS
from server.runtime.event_queue import Outbox, ReaderTooSlow
from tests.fakes import FakeEngine
from tests.server.driving import collect, create, driving, info, request, settled
from tests.server.harness import Gate


async def test_events_come_in_order_and_end_with_finished() -> None:
    async with driving(FakeEngine()) as driver:
        outbox: Outbox[Event] = Outbox(100)
        await driver.submit(request(), outbox)
        events = await collect(outbox)
    assert [type(event) for event in events] == [Started, *[TokenEvent] * 5, Finished]
    assert [event.seq for event in events if isinstance(event, TokenEvent)] == [1, 2, 3, 4, 5]


async def test_error_of_submit_is_raised_and_leaves_nothing_behind() -> None:
    async with driving(FakeEngine(max_sessions=1)) as driver:
        await create(driver)
        with pytest.raises(CapacityExhausted):
            await driver.submit(request(), Outbox(10))
        async with asyncio.timeout(60):
            await driver.drained()


async def test_used_request_id_is_refused() -> None:
    gate = Gate()
    async with driving(FakeEngine(before_step=gate), gate) as driver:
        submitting = asyncio.create_task(driver.submit(request(), Outbox(100)))
        await gate.reached()
        with pytest.raises(InvalidRequest, match="request_id"):
            await driver.submit(request(), Outbox(10))
        gate.open()
        await submitting


async def test_cancel_ends_with_reason_cancelled_and_frees_the_slot() -> None:
    gate = Gate()
    async with driving(FakeEngine(before_step=gate), gate) as driver:
        outbox: Outbox[Event] = Outbox(100)
        submitting = asyncio.create_task(driver.submit(request(max_tokens=10**6), outbox))
        gate.allow(2)
        await submitting
        driver.cancel("r")
        gate.open()
        last = (await collect(outbox))[-1]
        stats = await driver.stats()
    assert isinstance(last, Finished)
    assert last.finish_reason == "cancelled"
    assert stats.held_slots == 0


async def test_cancel_of_an_unknown_request_does_nothing() -> None:
    async with driving(FakeEngine()) as driver:
        driver.cancel("nobody")
        assert (await driver.stats()).num_running == 0


async def test_release_cancels_all_requests_of_a_reader_and_no_others() -> None:
    async with driving(FakeEngine()) as driver:
        gone: Outbox[Event] = Outbox(10**6)
        stays: Outbox[Event] = Outbox(10**6)
        await driver.submit(request("a", 10**6), gone)
        await driver.submit(request("b", 10**6), gone)
        await driver.submit(request("c", 50), stays)
        driver.release(gone)
        last = (await collect(stays))[-1]
        await driver.drained()
        assert (await settled(driver)).held_slots == 0
    assert isinstance(last, Finished)
    assert last.finish_reason == "length"


async def test_overflow_releases_the_reader() -> None:
    async with driving(FakeEngine()) as driver:
        outbox: Outbox[Event] = Outbox(16)
        await driver.submit(request(max_tokens=10**6), outbox)
        await driver.drained()
        with pytest.raises(ReaderTooSlow):
            await outbox.take()
        assert (await settled(driver)).held_slots == 0


async def test_loop_wakes_once_per_step_whatever_the_number_of_requests() -> None:
    gate = Gate()
    async with driving(FakeEngine(max_sessions=64, before_step=gate), gate) as driver:
        outbox: Outbox[Event] = Outbox(10**4)
        submits = [
            asyncio.create_task(driver.submit(request(f"r{n}", 4), outbox)) for n in range(64)
        ]
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*submits)
        batches = []
        num_finished = 0
        while num_finished < 64:
            batches.append(await outbox.take())
            num_finished += sum(isinstance(event, Finished) for event in batches[-1])
    assert len(batches) <= 64  # of 64 x 6 events


async def test_steps_that_wait_for_the_loop_reach_a_reader_as_one_batch() -> None:
    steps = threading.Semaphore(0)
    gate = Gate()

    def before_step() -> None:
        steps.release()
        gate()

    async with driving(FakeEngine(before_step=before_step), gate) as driver:
        outbox: Outbox[Event] = Outbox(100)
        submitting = asyncio.create_task(driver.submit(request(max_tokens=50), outbox))
        gate.allow(1)
        await submitting
        assert [type(event) for event in await outbox.take()] == [Started, TokenEvent]
        gate.allow(8)
        for _ in range(10):  # nothing is delivered meanwhile: this is the event loop's thread
            assert steps.acquire(timeout=10)
        batch = await outbox.take()
        assert [event.seq for event in batch if isinstance(event, TokenEvent)] == list(range(2, 10))
        driver.cancel("r")


async def test_draining_refuses_new_work_and_waits_for_the_old() -> None:
    gate = Gate()
    async with driving(FakeEngine(before_step=gate), gate) as driver:
        outbox: Outbox[Event] = Outbox(100)
        submitting = asyncio.create_task(driver.submit(request(), outbox))
        await asyncio.sleep(0)
        driver.begin_drain()
        assert driver.healthy
        assert not driver.ready
        with pytest.raises(Draining):
            await driver.submit(request("late"), outbox)
        with pytest.raises(Draining):
            await create(driver)
        drained = asyncio.create_task(driver.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        gate.open()
        await submitting
        await drained
        assert isinstance((await collect(outbox))[-1], Finished)


async def test_crash_of_the_engine_fails_every_reader_and_shows() -> None:
    async with driving(FakeEngine()) as driver:
        bystander: Outbox[Event] = Outbox(10**6)
        await driver.submit(request("bystander", 10**6), bystander)
        with pytest.raises(InternalFailure):
            await driver.submit(request("culprit", prompt="<crash>"), Outbox(10))
        await driver.died.wait()
        with pytest.raises(InternalFailure):
            await collect(bystander)
        assert not driver.healthy
        with pytest.raises(InternalFailure):
            await driver.submit(request("later"), Outbox(10))
        assert (await driver.stats()).max_sessions == 16  # the last known ones


async def test_unexpected_error_of_a_command_fails_that_command_alone() -> None:
    class Broken(FakeEngine):
        def create_session(self, owner: str, now: float) -> None:  # type: ignore[override]
            raise ZeroDivisionError

    async with driving(Broken()) as driver:
        with pytest.raises(InternalFailure):
            await create(driver)
        assert driver.healthy


async def test_hung_step_turns_health_red() -> None:
    gate, clock = Gate(), [0.0]
    async with driving(FakeEngine(before_step=gate), gate, clock) as driver:
        submitting = asyncio.create_task(driver.submit(request(), Outbox(100)))
        await gate.reached()
        assert driver.healthy
        clock[0] = STALL_S + 0.1
        assert not driver.healthy
        gate.open()
        await submitting
        assert driver.healthy


async def test_commands_are_bounded() -> None:
    gate = Gate()
    async with driving(FakeEngine(before_step=gate), gate) as driver:
        submitting = asyncio.create_task(driver.submit(request(), Outbox(100)))
        await gate.reached()
        calls = [asyncio.create_task(driver.stats()) for _ in range(MAX_COMMANDS)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await info(driver, "sess_x")
        gate.open()
        await asyncio.gather(submitting, *calls)


async def test_idle_session_expires_while_the_engine_sleeps() -> None:
    async with driving(FakeEngine(session_ttl_s=0.01)) as driver:
        created = await create(driver)
        async with asyncio.timeout(10):
            while (await driver.stats()).expired_sessions_total == 0:
                pass
        with pytest.raises(SessionNotFound):
            await info(driver, created.session)
        assert (await driver.stats()).expired_sessions_total == 1


async def test_latencies_are_measured_on_the_given_clock() -> None:
    clock = [0.0]

    def tick() -> None:
        clock[0] += 0.25

    async with driving(FakeEngine(before_step=tick), clock=clock) as driver:
        outbox: Outbox[Event] = Outbox(100)
        await driver.submit(request(max_tokens=3), outbox)
        await collect(outbox)
        text = render([Scrape("m", driver.metrics, [await driver.stats()])], 0).decode()
    assert 'everstream_ttft_seconds_sum{model="m"} 0.25\n' in text
    assert 'everstream_inter_token_seconds_sum{model="m"} 0.5\n' in text
    assert 'everstream_inter_token_seconds_bucket{le="0.25",model="m"} 2.0\n' in text
    assert 'everstream_inter_token_seconds_bucket{le="0.1",model="m"} 0.0\n' in text
    assert 'everstream_requests_total{finish_reason="length",model="m"} 1.0\n' in text
