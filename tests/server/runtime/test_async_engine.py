from __future__ import annotations

import asyncio
import threading

import pytest

from server.engine.engine import Engine
from server.engine.types import Event, Finished, Started, TokenEvent
from server.errors import (
    CapacityExhausted,
    InternalFailure,
    InvalidRequest,
    QueueFull,
    SessionNotFound,
)
from server.observability.metrics import Scrape, render
from server.runtime.async_engine import MAX_COMMANDS, STALL_S, Draining
from server.runtime.queues import EventQueue, ReaderTooSlow
from tests.fakes import FakeEngine
from tests.server.harness import Gate
from tests.server.running_engine import (
    begun,
    collect,
    create,
    driving,
    info,
    request,
    run,
    settled,
    submit,
)
from tests.waiting import started_task, started_tasks


async def test_events_come_in_order_and_end_with_finished() -> None:
    async with driving(FakeEngine()) as async_engine:
        events = await run(async_engine, request())
    assert [type(event) for event in events] == [Started, *[TokenEvent] * 5, Finished]
    assert [event.seq for event in events if isinstance(event, TokenEvent)] == [1, 2, 3, 4, 5]


async def test_error_of_submit_is_raised_and_leaves_nothing_behind() -> None:
    async with driving(FakeEngine(max_sessions=1)) as async_engine:
        await create(async_engine)
        with pytest.raises(CapacityExhausted):
            await submit(async_engine, request(), EventQueue(10))
        async with asyncio.timeout(60):
            await async_engine.drained()


async def test_used_request_id_is_refused() -> None:
    gate = Gate()
    async with driving(FakeEngine(before_step=gate), gate) as async_engine:
        submitting = asyncio.create_task(submit(async_engine, request(), EventQueue(100)))
        await gate.reached()
        with pytest.raises(InvalidRequest, match="request_id"):
            await submit(async_engine, request(), EventQueue(10))
        gate.open()
        await submitting


async def test_cancel_ends_with_reason_cancelled_and_frees_the_slot() -> None:
    gate = Gate()
    async with driving(FakeEngine(before_step=gate), gate) as async_engine:
        event_queue: EventQueue[Event] = EventQueue(100)
        submitting = asyncio.create_task(
            submit(async_engine, request(max_tokens=10**6), event_queue)
        )
        gate.allow(2)
        await submitting
        async_engine.requests.cancel("r")
        gate.open()
        last = (await collect(event_queue))[-1]
        stats = await async_engine.stats()
    assert isinstance(last, Finished)
    assert last.finish_reason == "cancelled"
    assert stats.held_slots == 0


async def test_cancel_of_an_unknown_request_does_nothing() -> None:
    async with driving(FakeEngine()) as async_engine:
        async_engine.requests.cancel("nobody")
        assert (await async_engine.stats()).num_running == 0


async def test_release_cancels_all_requests_of_a_reader_and_no_others() -> None:
    async with driving(FakeEngine()) as async_engine:
        gone: EventQueue[Event] = EventQueue(10**6)
        stays: EventQueue[Event] = EventQueue(10**6)
        await submit(async_engine, request("a", 10**6), gone)
        await submit(async_engine, request("b", 10**6), gone)
        await submit(async_engine, request("c", 50), stays)
        async_engine.requests.release(gone)
        last = (await collect(stays))[-1]
        await async_engine.drained()
        assert (await settled(async_engine)).held_slots == 0
    assert isinstance(last, Finished)
    assert last.finish_reason == "length"


async def test_overflow_releases_the_reader() -> None:
    async with driving(FakeEngine()) as async_engine:
        event_queue = await begun(async_engine, request(max_tokens=10**6), 16)
        await async_engine.drained()
        with pytest.raises(ReaderTooSlow):
            await event_queue.take()
        assert (await settled(async_engine)).held_slots == 0


class Broken(EventQueue[Event]):
    """What encodes its events fails."""

    def put(self, events: list[Event]) -> bool:
        raise ValueError("not encoded")


async def test_reader_that_cannot_be_written_to_fails_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    async with driving(FakeEngine(before_step=gate), gate) as async_engine:
        broken = Broken(9)
        whole: EventQueue[Event] = EventQueue(99)
        queues = {"broken": broken, "whole": whole}
        submits = await started_tasks(
            submit(async_engine, request(name), queue) for name, queue in queues.items()
        )
        gate.open()  # both begin in one step
        await asyncio.gather(*submits)
        assert len(await collect(whole)) == len(await run(async_engine, request("again")))
        with pytest.raises(InternalFailure):
            await broken.take()
    assert "not encoded" in caplog.text


async def test_loop_wakes_once_per_step_for_any_number_of_requests() -> None:
    gate = Gate()
    async with driving(FakeEngine(max_sessions=64, before_step=gate), gate) as async_engine:
        event_queue: EventQueue[Event] = EventQueue(10**4)
        submits = await started_tasks(
            submit(async_engine, request(f"r{n}", 4), event_queue) for n in range(64)
        )
        gate.open()
        await asyncio.gather(*submits)
        batches = []
        num_finished = 0
        while num_finished < 64:
            batches.append(await event_queue.take())
            num_finished += sum(isinstance(event, Finished) for event in batches[-1])
    assert len(batches) <= 64  # of 64 x 6 events


async def test_steps_that_wait_for_the_loop_reach_a_reader_as_one_batch() -> None:
    steps = threading.Semaphore(0)
    gate = Gate()

    def before_step() -> None:
        steps.release()
        gate()

    async with driving(FakeEngine(before_step=before_step), gate) as async_engine:
        event_queue: EventQueue[Event] = EventQueue(100)
        submitting = asyncio.create_task(submit(async_engine, request(max_tokens=50), event_queue))
        gate.allow(1)
        await submitting
        assert [type(event) for event in await event_queue.take()] == [Started, TokenEvent]
        gate.allow(8)
        for _ in range(10):  # nothing is delivered meanwhile: this is the event loop's thread
            assert steps.acquire(timeout=60)
        batch = await event_queue.take()
        assert [event.seq for event in batch if isinstance(event, TokenEvent)] == list(range(2, 10))
        async_engine.requests.cancel("r")


async def test_draining_refuses_new_work_and_waits_for_the_old() -> None:
    gate = Gate()
    async with driving(FakeEngine(before_step=gate), gate) as async_engine:
        event_queue: EventQueue[Event] = EventQueue(100)
        submitting = await started_task(submit(async_engine, request(), event_queue))
        async_engine.begin_drain()
        assert async_engine.healthy
        assert not async_engine.ready
        with pytest.raises(Draining):
            await submit(async_engine, request("late"), event_queue)
        with pytest.raises(Draining):
            await create(async_engine)
        drained = await started_task(async_engine.drained())
        assert not drained.done()
        gate.open()
        await submitting
        await drained
        assert isinstance((await collect(event_queue))[-1], Finished)


async def test_crash_of_the_engine_fails_every_reader_and_shows() -> None:
    async with driving(FakeEngine()) as async_engine:
        bystander = await begun(async_engine, request("bystander", 10**6))
        with pytest.raises(InternalFailure):
            await submit(async_engine, request("culprit", prompt="<crash>"), EventQueue(10))
        await async_engine.died.wait()
        with pytest.raises(InternalFailure):
            await collect(bystander)
        assert not async_engine.healthy
        with pytest.raises(InternalFailure):
            await submit(async_engine, request("later"), EventQueue(10))
        assert (await async_engine.stats()).max_sessions == 16  # the last known ones


async def test_unexpected_error_of_a_command_fails_that_command_alone() -> None:
    def broken(engine: Engine, now: float) -> None:
        raise ZeroDivisionError

    async with driving(FakeEngine()) as async_engine:
        with pytest.raises(InternalFailure):
            await async_engine.call(broken)
        assert async_engine.healthy


async def test_hung_step_turns_health_red() -> None:
    gate, clock = Gate(), [0.0]
    async with driving(FakeEngine(before_step=gate), gate, clock) as async_engine:
        submitting = asyncio.create_task(submit(async_engine, request(), EventQueue(100)))
        await gate.reached()
        assert async_engine.healthy
        clock[0] = STALL_S + 0.1
        assert not async_engine.healthy
        gate.open()
        await submitting
        assert async_engine.healthy


async def test_commands_are_bounded() -> None:
    gate = Gate()
    async with driving(FakeEngine(before_step=gate), gate) as async_engine:
        submitting = asyncio.create_task(submit(async_engine, request(), EventQueue(100)))
        await gate.reached()
        calls = await started_tasks(async_engine.stats() for _ in range(MAX_COMMANDS))
        with pytest.raises(QueueFull):
            await info(async_engine, "sess_x")
        gate.open()
        await asyncio.gather(submitting, *calls)


async def test_idle_session_expires_while_the_engine_sleeps() -> None:
    async with driving(FakeEngine(session_ttl_s=0.01)) as async_engine:
        created = await create(async_engine)
        async with asyncio.timeout(60):
            while (await async_engine.stats()).expired_sessions_total == 0:
                pass
        with pytest.raises(SessionNotFound):
            await info(async_engine, created.session)
        assert (await async_engine.stats()).expired_sessions_total == 1


async def test_latencies_are_measured_on_the_given_clock() -> None:
    clock = [0.0]

    def tick() -> None:
        clock[0] += 0.25

    async with driving(FakeEngine(before_step=tick), clock=clock) as async_engine:
        await run(async_engine, request(max_tokens=3))
        text = render([Scrape("m", async_engine.metrics, [await async_engine.stats()])], 0).decode()
    assert 'everstream_ttft_seconds_sum{model="m"} 0.25\n' in text
    assert 'everstream_inter_token_seconds_sum{model="m"} 0.5\n' in text
    assert 'everstream_inter_token_seconds_bucket{le="0.25",model="m"} 2.0\n' in text
    assert 'everstream_inter_token_seconds_bucket{le="0.1",model="m"} 0.0\n' in text
    assert 'everstream_requests_total{finish_reason="length",model="m"} 1.0\n' in text
