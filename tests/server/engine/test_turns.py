"""More requests than can run at once: owners take turns, and long ones make room."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from server.engine.engine import Engine
from server.engine.scheduler import TURN_TOKENS
from server.engine.types import Finished, Started
from tests.fakes import FakeRuntime
from tests.tiny import check_books, drain, request, solo, tiny_tokenizer, tokens_of

MakeEngine = Callable[..., Engine]


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(tiny_tokenizer().vocab_size)


def order(engine: Engine) -> list[str]:
    """In which requests begin."""
    events = []
    while engine.has_work():
        events += engine.step(0.0)
    return [event.request_id for event in events if isinstance(event, Started)]


def test_owner_with_one_request_does_not_wait_for_all_of_another(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1)
    for i in range(5):
        engine.submit(request(f"a{i}", owner="a"), 0.0)
    engine.submit(request("b0", owner="b"), 0.0)
    engine.submit(request("c0", owner="c"), 0.0)
    assert order(engine) == ["a0", "b0", "c0", "a1", "a2", "a3", "a4"]


def test_long_request_is_preempted_after_its_turn(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1)
    engine.submit(request("long", max_tokens=10 * TURN_TOKENS, owner="a"), 0.0)
    engine.step(0.0)
    engine.submit(request("short", max_tokens=3, owner="b"), 0.0)
    events = [event for _ in range(TURN_TOKENS + 2) for event in engine.step(0.0)]
    (last,) = [event for event in events if isinstance(event, Finished)]
    assert last.request_id == "short"
    assert len(tokens_of(e for e in events if e.request_id == "long")) == TURN_TOKENS - 1
    assert engine.stats().preemptions_total == 1
    engine.cancel("long")


def test_no_preemption_without_waiting_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=2)
    for name in "ab":
        engine.submit(request(name, max_tokens=2 * TURN_TOKENS), 0.0)
    drain(engine)
    assert engine.stats().preemptions_total == 0


@pytest.mark.parametrize(("slots", "asleep"), [(1, 3), (2, 2), (4, 0)])
def test_turns_do_not_change_tokens(make_engine: MakeEngine, slots: int, asleep: int) -> None:
    """Four long requests for one place or two: each is interrupted and loses its slot."""
    options = {"max_tokens": 3 * TURN_TOKENS, "repetition_penalty": 1.2}
    requests = [
        request(f"{i}", range(i + 1), seed=i, owner=f"{i % 3}", **options) for i in range(4)
    ]
    alone = make_engine()
    wanted = {req.request_id: tokens_of(solo(alone, req)) for req in requests}
    engine = make_engine(max_sessions=slots, max_asleep=asleep, max_running=2)
    for req in requests:
        engine.submit(req, 0.0)
    events = drain(engine)
    assert {name: tokens_of(events[name]) for name in events} == wanted
    assert engine.stats().preemptions_total >= 4
    check_books(engine)


def test_preempted_requests_advance_equally(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1)
    for name in "abc":
        engine.submit(request(name, max_tokens=10**5, owner=name), 0.0)
    seen = [event for _ in range(6 * TURN_TOKENS) for event in engine.step(0.0)]
    counts = [len(tokens_of(e for e in seen if e.request_id == name)) for name in "abc"]
    assert counts == [2 * TURN_TOKENS] * 3
    for name in "abc":
        engine.cancel(name)
