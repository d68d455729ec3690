from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from server.cluster.ray.proxy import SessionRouter, ranked, tag_of

REPLICAS = ["k3v9ad1x", "p0q7zz2m", "a1b2c3d4", "w8e5r2t7"]
HEX = "0123456789abcdef" * 2


def session_by(replica: str, rest: str = HEX) -> str:
    return f"sess_{tag_of(replica)}{rest}"


@pytest.mark.parametrize("replica", REPLICAS)
def test_maker_of_a_session_comes_first(replica: str) -> None:
    assert ranked(session_by(replica), REPLICAS)[0] == replica


def test_every_replica_has_its_turn() -> None:
    for session in ("sess_abc", session_by("gone"), session_by(REPLICAS[0])):
        assert sorted(ranked(session, REPLICAS)) == sorted(REPLICAS)


def test_order_of_the_replicas_changes_nothing() -> None:
    for number in range(50):
        session = f"sess_{number:032x}"
        assert ranked(session, REPLICAS) == ranked(session, REPLICAS[::-1])


def test_sessions_without_a_maker_are_spread_evenly() -> None:
    firsts = [ranked(f"sess_{number:032x}", REPLICAS)[0] for number in range(4000)]
    for replica in REPLICAS:
        assert 850 < firsts.count(replica) < 1150


def test_replica_that_goes_moves_its_own_sessions_only() -> None:
    gone, *left = REPLICAS
    for number in range(300):
        before = ranked(session_by("none", f"{number:032x}"), REPLICAS)
        before.remove(gone)
        assert ranked(session_by("none", f"{number:032x}"), left) == before


def test_replica_that_comes_takes_only_its_share() -> None:
    sessions = [f"sess_{number:032x}" for number in range(1000)]
    before = [ranked(session, REPLICAS[1:])[0] for session in sessions]
    after = [ranked(session, REPLICAS)[0] for session in sessions]
    moved = [now for then, now in zip(before, after, strict=True) if then != now]
    assert set(moved) == {REPLICAS[0]}
    assert len(moved) < 330


# The router of Serve


def replicas(*ids: str) -> list[RunningReplica]:
    made = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=id)) for id in ids]
    return cast(list[RunningReplica], made)


def pending(session: str) -> PendingRequest:
    metadata = cast(Any, SimpleNamespace(session_id=session))
    return PendingRequest([], {}, metadata, future=cast(Any, None))


async def choose(session: str | None, *ids: str) -> list[list[str]]:
    router = cast(SessionRouter, SimpleNamespace())
    request = None if session is None else pending(session)
    groups = await SessionRouter.choose_replicas(router, replicas(*ids), request)
    if request is not None:
        # Else Serve would ask again without a pause where all replicas are full.
        assert request.routing_context.should_backoff
    return [[replica.replica_id.unique_id for replica in group] for group in groups]


async def test_request_of_a_session_tries_one_replica_after_the_other() -> None:
    session = session_by("w8e5r2t7")
    groups = await choose(session, *REPLICAS)
    assert groups == [[id] for id in ranked(session, REPLICAS)]


async def test_request_without_a_session_has_two_to_choose_from() -> None:
    for session in ("", None):
        (group,) = await choose(session, *REPLICAS)
        assert len(set(group)) == 2
        assert set(group) <= set(REPLICAS)
    assert await choose("", "only") == [["only"]]
    assert await choose("", *()) == [[]]


async def test_busy_replica_has_time_to_tell_its_queue() -> None:
    """More than Serve grants by itself: else a session would move whenever a machine is busy."""
    asked: list[float] = []

    async def get_queue_len(deadline_s: float) -> int:
        asked.append(deadline_s)
        return 3

    router = Mock(
        _event_loop=asyncio.get_running_loop(),
        queue_len_response_deadline_s=SessionRouter.queue_len_response_deadline_s,
        max_queue_len_response_deadline_s=SessionRouter.max_queue_len_response_deadline_s,
    )
    replica = SimpleNamespace(replica_id="a", get_queue_len=get_queue_len)
    probed = await SessionRouter._probe_queue_lens(router, [cast(Any, replica)], 0)
    assert probed == [(replica, 3)]
    assert asked == [SessionRouter.queue_len_response_deadline_s]
    assert asked[0] > RequestRouter.queue_len_response_deadline_s
