from __future__ import annotations

import asyncio
import threading

import pytest

from server.runtime.queues import MAX_UNDELIVERED, DeliveryQueue, EngineStep

TIMEOUT_S = 60.0


@pytest.mark.parametrize("num_tokens", [1, 3, MAX_UNDELIVERED, 1000])
async def test_step_takes_a_place_for_each_token_of_one_request(num_tokens: int) -> None:
    """At most all, so that the engine can always deliver a step; `take` gives them back."""
    queue = DeliveryQueue(lambda: None, lambda: None)
    queue.open(asyncio.get_running_loop())
    num_places = queue.reserve(num_tokens)
    assert num_places == min(num_tokens, MAX_UNDELIVERED)
    queue.put(EngineStep(0, num_places=num_places))
    assert queue.num_free == MAX_UNDELIVERED - num_places
    assert len(queue.take()) == 1
    assert queue.num_free == MAX_UNDELIVERED


@pytest.mark.parametrize("num_tokens", [1, 5])
async def test_engine_waits_for_room_and_no_step_is_lost(num_tokens: int) -> None:
    """A thread puts far more steps than there is room for, as fast as they are taken."""
    num_steps, taken, num_free = 2000, list[int](), list[int]()
    done = asyncio.Event()

    def deliver() -> None:
        num_free.append(queue.num_free)
        taken.extend(step.generation for step in queue.take())
        if len(taken) == num_steps:
            done.set()

    def put() -> None:
        for number in range(num_steps):
            queue.put(EngineStep(number, num_places=queue.reserve(num_tokens)))

    queue = DeliveryQueue(deliver, lambda: None)
    queue.open(asyncio.get_running_loop())
    threading.Thread(target=put, daemon=True).start()
    await asyncio.wait_for(done.wait(), TIMEOUT_S)
    assert taken == list(range(num_steps))
    assert min(num_free) >= 0
    assert queue.num_free == MAX_UNDELIVERED
