from __future__ import annotations

import pytest

from clients.python import Backoff, CapacityExhausted, ConnectionLost

LOST = ConnectionLost("gone")


class FakeTime:
    """Time that passes by sleeping alone. ``slept`` is how long, each time."""

    def __init__(self, random: float = 1.0) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []
        self.backoff = Backoff(0.1, 5.0, self._sleep, lambda: random, lambda: self.now_s)

    async def _sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        self.now_s += delay_s


async def test_waits_double_up_to_the_maximum() -> None:
    time = FakeTime()
    attempts = time.backoff.attempts(1000)
    for _ in range(8):
        await attempts.wait(LOST)
    assert time.slept == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


@pytest.mark.parametrize(("random", "first_s"), [(0.0, 0.05), (0.5, 0.075), (1.0, 0.1)])
async def test_jitter_shortens_a_wait_by_up_to_half(random: float, first_s: float) -> None:
    time = FakeTime(random)
    await time.backoff.attempts(10).wait(LOST)
    assert time.slept == [pytest.approx(first_s)]


async def test_last_try_is_at_the_end_of_the_time_and_then_its_error_is_raised() -> None:
    time = FakeTime()
    attempts = time.backoff.attempts(1.0)
    for _ in range(4):
        await attempts.wait(LOST)
    assert time.now_s == pytest.approx(101.0)
    with pytest.raises(ConnectionLost, match="gone"):
        await attempts.wait(LOST)
    assert len(time.slept) == 4


async def test_no_time_is_no_second_try() -> None:
    time = FakeTime()
    with pytest.raises(ConnectionLost, match="gone"):
        await time.backoff.attempts(0).wait(LOST)
    assert time.slept == []


async def test_retry_after_of_the_server_is_honored() -> None:
    time, error = FakeTime(), CapacityExhausted("full")
    error.retry_after_s = 3.0
    attempts = time.backoff.attempts(4.0)
    await attempts.wait(error)
    await attempts.wait(error)
    assert time.slept == [3.0, 1.0]
