"""28: out of memory: admission shrinks, and the newest request is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from server.engine.engine import Engine
from server.engine.runner import Feed
from server.engine.step import CALM_STEPS
from server.engine.types import Failed
from server.errors import OutOfMemory
from tests.reliability.engines import BACKENDS, Model, check_baseline
from tests.reliability.faulty_runner import FaultyRunner
from tests.tiny import drain, finished, request, solo, state_of, tokens_of


@pytest.fixture(params=BACKENDS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def engine_with_room_for(model: Model, num_rows: int) -> Engine:
    """In its memory; its own limits are higher."""

    def fault(feeds: Sequence[Feed]) -> Exception | None:
        return MemoryError() if len(feeds) > num_rows else None

    return model.engine(wrap=lambda runner: FaultyRunner(runner, fault))


def test_the_newest_fail_and_the_others_equal_solo_runs(model: Model) -> None:
    requests = [request(f"{i}", range(1, 9 + i), seed=i, max_tokens=20) for i in range(6)]
    alone, engine = model.engine(), engine_with_room_for(model, 4)
    for req in requests:
        engine.submit(req, 0.0)
    events = drain(engine)
    for req in requests[:4]:
        assert tokens_of(events[req.request_id]) == tokens_of(solo(alone, req))
    for name in ("4", "5"):
        failed = events[name][-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, OutOfMemory)
    check_baseline(engine)


def test_later_requests_wait_for_their_turn_instead(model: Model) -> None:
    engine = engine_with_room_for(model, 2)
    for i in range(3):
        engine.submit(request(f"{i}", max_tokens=5), 0.0)
    drain(engine)
    for i in range(5):
        engine.submit(request(f"{i}", max_tokens=5), 0.0)
    most, events = 0, []
    while engine.has_work():
        events += engine.step(0.0)
        most = max(most, engine.stats().num_running)
    assert most <= 2
    for i in range(5):
        last = finished(event for event in events if event.request_id == f"{i}")
        assert last.finish_reason == "length"
    check_baseline(engine)


def test_kept_session_of_a_refused_request_continues(model: Model) -> None:
    """Its state is what it was, and so is its text but for what had been read of the prompt."""
    alone, engine = model.engine(), engine_with_room_for(model, 1)
    mine, theirs = (e.kept.create("me", 0.0).session for e in (engine, alone))
    for e, session in ((engine, mine), (alone, theirs)):
        solo(e, request("first", range(1, 40), session))
    engine.submit(request("other", max_tokens=30), 0.0)
    engine.submit(request("r", (5, 6, 7), mine), 0.0)
    assert isinstance(drain(engine)["r"][-1], Failed)
    assert state_of(engine, mine) == state_of(alone, theirs)
    for e, session in ((engine, mine), (alone, theirs)):
        solo(e, request("r", (5, 6, 7), session))
    assert state_of(engine, mine) == state_of(alone, theirs)
    check_baseline(engine)


def test_request_that_does_not_even_fit_alone_fails_and_the_engine_lives(model: Model) -> None:
    engine = engine_with_room_for(model, 0)
    for name in ("a", "b"):
        engine.submit(request(name), 0.0)
    events = drain(engine)
    assert all(isinstance(events[name][-1], Failed) for name in ("a", "b"))
    check_baseline(engine)


def test_admission_grows_again_once_memory_is_free(model: Model) -> None:
    rooms = [2]

    def fault(feeds: Sequence[Feed]) -> Exception | None:
        return MemoryError() if len(feeds) > rooms[0] else None

    engine = model.engine(wrap=lambda runner: FaultyRunner(runner, fault))
    for i in range(3):
        engine.submit(request(f"{i}", max_tokens=5), 0.0)
    drain(engine)
    rooms[0] = 100
    for i in range(3):
        engine.submit(request(f"{i}", max_tokens=2 * CALM_STEPS, ignore_eos=True), 0.0)
    most = 0
    while engine.has_work():
        engine.step(0.0)
        most = max(most, engine.stats().num_running)
    assert most == 3
