"""Scopes and limits below the wire: the tables, and the arithmetic of rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.auth import (
    MESSAGES,
    Bucket,
    Caller,
    Limits,
    RateLimited,
    Room,
    ScopeMissing,
    Tenant,
)
from server.api.schemas.requests import MESSAGE_TYPES


class HandClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tenant(clock: HandClock | None = None, **limits: int) -> Tenant:
    return Tenant("alice", Limits(**limits), clock or HandClock())


# Scopes


def test_request_without_its_scope_is_refused_and_not_counted() -> None:
    alice = Caller(tenant(requests_per_minute=1), frozenset({"read"}))
    with pytest.raises(ScopeMissing, match="generate"):
        alice.request("generate")
    alice.request("admin", "read")
    with pytest.raises(RateLimited):
        alice.request("read")


def test_every_message_has_its_scope() -> None:
    assert set(MESSAGE_TYPES) == MESSAGES.keys()


# Rates


def test_burst_of_a_minute_is_allowed_and_then_the_rate() -> None:
    clock = HandClock()
    alice = tenant(clock, requests_per_minute=3)
    for _ in range(3):
        alice.request()
    with pytest.raises(RateLimited) as refused:
        alice.request()
    assert refused.value.retry_after_s == pytest.approx(20, abs=0.002)
    clock.now += 40  # two more
    alice.request()
    alice.request()
    with pytest.raises(RateLimited):
        alice.request()
    assert (alice.requests_total, alice.refused_total) == (5, 2)


def test_idle_time_saves_at_most_a_minute() -> None:
    clock = HandClock()
    alice = tenant(clock, requests_per_minute=2)
    clock.now += 3600
    alice.request()
    alice.request()
    with pytest.raises(RateLimited):
        alice.request()


@given(
    st.integers(1, 10**7),
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 10**6)), max_size=20),
    st.floats(0, 1e7),
)
def test_wait_s_is_long_enough_and_not_much_longer(
    per_minute: int, uses: list[tuple[float, int]], start_s: float
) -> None:
    bucket, now = Bucket(), start_s
    for pause_s, amount in uses:
        now += pause_s
        bucket.take(now, amount, per_minute)
    wait_s = bucket.wait_s(now, per_minute)
    assert bucket.wait_s(now + wait_s, per_minute) == 0
    if wait_s > 0.002:
        assert bucket.wait_s(now + wait_s - 0.002, per_minute) > 0


@given(
    st.integers(1, 1000),
    st.lists(st.floats(0, 30), min_size=1, max_size=200),
)
def test_no_time_admits_more_than_the_bucket_and_its_filling(
    per_minute: int, pauses: list[float]
) -> None:
    """Over t seconds at most per_minute (1 + t / 60)."""
    clock = HandClock()
    alice = tenant(clock, requests_per_minute=per_minute)
    admitted = 0
    for pause_s in pauses:
        clock.now += pause_s
        try:
            alice.request()
        except RateLimited:
            continue
        admitted += 1
    assert admitted <= per_minute * (1 + sum(pauses) / 60) + 1e-3


def test_next_request_waits_for_all_unpaid_tokens() -> None:
    clock = HandClock()
    alice = tenant(clock, tokens_per_minute=600)  # ten a second
    alice.check_tokens()
    alice.spend(1600)
    with pytest.raises(RateLimited) as refused:
        alice.check_tokens()
    # A thousand are unfed, and the next work wants one to be there.
    assert refused.value.retry_after_s == pytest.approx(100.1, abs=0.002)
    clock.now += refused.value.retry_after_s
    alice.check_tokens()
    assert alice.tokens_total == 1600


def test_token_limit_does_not_apply_to_requests_without_tokens() -> None:
    alice = tenant(tokens_per_minute=1)
    alice.spend(100)
    alice.request()


@pytest.mark.parametrize(
    "limit", ["max_running", "max_connections", "max_sessions", "max_stored_bytes"]
)
def test_room_reaches_up_to_its_limit(limit: Room) -> None:
    alice = tenant(**{limit: 3})
    alice.check_room(limit, 3)
    with pytest.raises(RateLimited, match=limit) as refused:
        alice.check_room(limit, 4)
    assert refused.value.retry_after_s == 1


def test_connections_are_bounded_and_their_end_makes_room() -> None:
    alice = tenant(max_connections=1)
    with alice.connection():
        with pytest.raises(RateLimited, match="max_connections"), alice.connection():
            pass
        assert alice.num_connections == 1
    with alice.connection():
        pass
    assert alice.num_connections == 0


def test_without_limits_nothing_is_refused() -> None:
    alice = tenant()
    for _ in range(10_000):
        alice.request()
    alice.spend(10**12)
    alice.check_tokens()
    alice.check_room("max_running", 10**6)
    assert alice.refused_total == 0
