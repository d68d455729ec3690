from __future__ import annotations

import asyncio

import pytest

from server.runtime.queues import MAX_UNDELIVERED, DeliveryQueue, EngineStep


def free_places(queue: DeliveryQueue) -> int:
    """Takes all of them."""
    num = 0
    while queue._room.acquire(blocking=False):
        num += 1
    return num


@pytest.mark.parametrize("num_tokens", [1, 3, MAX_UNDELIVERED, 1000])
async def test_step_takes_a_place_for_each_token_of_one_request(num_tokens: int) -> None:
    """At most all, so that the engine can always deliver a step; `take` gives them back."""
    queue = DeliveryQueue(lambda: None, lambda: None)
    queue.open(asyncio.get_running_loop())
    num_places = queue.reserve(num_tokens)
    assert num_places == min(num_tokens, MAX_UNDELIVERED)
    queue.put(EngineStep(0, num_places=num_places))
    assert free_places(queue) == MAX_UNDELIVERED - num_places
    assert len(queue.take()) == 1
    assert free_places(queue) == num_places
