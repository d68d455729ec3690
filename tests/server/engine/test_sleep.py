"""More sessions than slots: the idle ones are evicted, and no client can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from model.native.runtime import Runtime
from server.engine.engine import Engine
from server.errors import CapacityExhausted
from tests.tiny import check_books, drain, finished, request, solo, state_of, tokens_of

MakeEngine = Callable[..., Engine]


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


def test_sessions_that_share_slots_have_the_tokens_and_bits_of_solo_runs(
    make_engine: MakeEngine,
) -> None:
    """Three turns of six sessions in two slots, so that each sleeps between its turns."""
    roomy, tight = make_engine(), make_engine(max_sessions=2, max_asleep=4)
    found: list[list[object]] = []
    for engine in (roomy, tight):
        sessions = [engine.kept.create("me", 0.0).session for _ in range(6)]
        tokens: list[object] = []
        for turn in range(3):
            for i, session in enumerate(sessions):
                prompt = range(i + 1, i + 40 + 30 * turn)
                req = request(f"{i}", prompt, session, seed=i, repetition_penalty=1.3)
                engine.submit(req, 0.0)
                if engine is roomy:
                    tokens.append(tokens_of(drain(engine)[f"{i}"]))
            if engine is tight:
                events = drain(engine)
                tokens += [tokens_of(events[f"{i}"]) for i in range(6)]
        found.append([*tokens, *(state_of(engine, session) for session in sessions)])
        check_books(engine)
    assert found[0] == found[1]
    assert tight.stats().num_asleep == 4


def test_capacity_is_the_slots_and_those_that_sleep(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=2, max_asleep=3)
    for _ in range(5):
        session = engine.kept.create("me", 0.0).session
        solo(engine, request(session=session))
    with pytest.raises(CapacityExhausted):
        engine.kept.create("me", 0.0)
    with pytest.raises(CapacityExhausted):
        engine.submit(request(), 0.0)
    stats = engine.stats()
    assert (stats.num_sessions, stats.held_slots, stats.num_asleep) == (5, 2, 3)
    engine.kept.delete(session, "me")
    engine.kept.create("me", 0.0)


def test_state_sleeps_only_where_its_slot_is_wanted(make_engine: MakeEngine) -> None:
    """The slot of who has rested for longest goes first."""
    engine = make_engine(max_sessions=2, max_asleep=2)
    first, second = (engine.kept.create("me", 0.0).session for _ in range(2))
    for session in (first, second, first):
        solo(engine, request(session=session))
    assert engine.stats().num_asleep == 0
    before = state_of(engine, second)
    solo(engine, request())
    assert engine.stats().num_asleep == 1
    sleeper = engine._sessions.find(second, "me")
    assert sleeper.slot is None
    assert state_of(engine, second) == before


def test_session_that_runs_never_sleeps(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=1, max_asleep=1)
    engine.submit(request("a", max_tokens=20), 0.0)
    engine.step(0.0)
    engine.submit(request("b", max_tokens=2), 0.0)
    for _ in range(10):
        engine.step(0.0)
        assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    events = drain(engine)
    assert finished(events["a"]).usage.completion_tokens == 20
    assert finished(events["b"]).usage.completion_tokens == 2


def test_empty_session_holds_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=1, max_asleep=4)
    for _ in range(5):
        engine.kept.create("me", 0.0)
    assert (engine.stats().held_slots, engine.stats().num_asleep) == (0, 0)
