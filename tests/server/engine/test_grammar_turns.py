"""Grammars that take long: their rows continue in turn, and other streams do not wait for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from server.engine.engine import Engine
from server.engine.types import TokenEvent
from tests.fakes import FakeRuntime
from tests.server.engine.grammars import (
    EOS,
    GRAMMAR,
    LENGTH,
    VOCAB_SIZE,
    FakeMatchers,
    constrained,
)
from tests.tiny import request

MakeEngine = Callable[..., Engine]


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(VOCAB_SIZE)


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    """Whose grammars take a second for each token."""
    return engine_of_grammars(make_engine, 1.0)


def engine_of_grammars(make_engine: MakeEngine, cost_s: float) -> Engine:
    matchers = FakeMatchers(VOCAB_SIZE, EOS, cost_s)
    return make_engine(matchers=matchers, max_sessions=16, max_running=16)


def submit(engine: Engine, name: str, owner: str) -> None:
    asked = replace(constrained(grammar=GRAMMAR), request_id=name, owner=owner)
    engine.submit(asked, 0.0)


def tokens_of(engine: Engine) -> Counter[str]:
    """Of one step."""
    return Counter(e.request_id for e in engine.step(0.0) if isinstance(e, TokenEvent))


def begun(engine: Engine, names: set[str]) -> None:
    """Steps until each has a token: what the first costs is not known before."""
    seen: set[str] = set()
    while not names <= seen:
        seen |= tokens_of(engine).keys()


def test_step_runs_one_costly_row_and_all_others(engine: Engine) -> None:
    names = {f"a{index}" for index in range(6)}
    for name in names:
        submit(engine, name, "a")
    begun(engine, names)
    engine.submit(request("plain", owner="b", max_tokens=6), 0.0)
    seen: Counter[str] = Counter()
    while seen["plain"] < 6:
        step = tokens_of(engine)
        assert sum(step.values()) - step["plain"] == 1
        seen += step
    assert max(seen[name] for name in names) - min(seen[name] for name in names) <= 1


def test_owners_with_costly_grammars_take_turns(engine: Engine) -> None:
    names = {f"a{index}" for index in range(6)}
    for name in names:
        submit(engine, name, "a")
    begun(engine, names)
    submit(engine, "b", "b")
    begun(engine, {"b"})
    steps = [tokens_of(engine) for _ in range(6)]
    assert sum(step["b"] for step in steps) == 3


def test_turns_change_no_token(
    engine: Engine, make_engine: MakeEngine, matchers: FakeMatchers
) -> None:
    alone = make_engine(matchers=matchers)
    submit(alone, "a0", "a")
    expected = drained(alone)["a0"]
    for index in range(4):
        submit(engine, f"a{index}", "a")
    found = drained(engine)
    assert len(expected) >= LENGTH // 2
    assert [found[f"a{index}"] for index in range(4)] == [expected] * 4


def drained(engine: Engine) -> dict[str, list[int]]:
    """The tokens of each request."""
    found: dict[str, list[int]] = {}
    while engine.has_work():
        for event in engine.step(0.0):
            if isinstance(event, TokenEvent):
                found.setdefault(event.request_id, []).append(event.token_id)
    return found


def test_cheap_grammars_all_run_in_each_step(make_engine: MakeEngine) -> None:
    engine = engine_of_grammars(make_engine, 0.0)
    names = {f"a{index}" for index in range(8)}
    for name in names:
        submit(engine, name, "a")
    begun(engine, names)
    assert tokens_of(engine).keys() == names
