"""Nothing that happens to a session on the way changes what a grammar makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from server.engine.engine import Engine
from server.engine.session import Constraint
from tests.fakes import FakeRuntime
from tests.server.engine.grammars import (
    GRAMMAR,
    LENGTH,
    PROMPT,
    SEED,
    VOCAB_SIZE,
    FakeMatchers,
    constrained,
    constraint,
)
from tests.server.engine.ledger import Ledger
from tests.tiny import drain, finished, request, solo, tokens_of

MakeEngine = Callable[..., Engine]


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(VOCAB_SIZE)


@pytest.fixture
def make(make_engine: MakeEngine, matchers: FakeMatchers) -> MakeEngine:
    return lambda **config: make_engine(**{"matchers": matchers, **config})


@pytest.fixture
def whole(make: MakeEngine) -> list[int]:
    """What the grammar makes of `PROMPT`, left alone: all that it may hold."""
    events = solo(make(), constrained())
    assert finished(events).finish_reason == "stop"
    assert len(tokens_of(events)) == LENGTH
    return tokens_of(events)


def begun(engine: Engine, place: int) -> list[int]:
    """The first tokens of the request ``r`` on a kept session."""
    engine.submit(replace(constrained(), keep=True), 0.0)
    seen: list[int] = []
    while len(seen) < place:
        seen += tokens_of(engine.step(0.0))
    return seen


def ended(engine: Engine, **options: object) -> str:
    """A kept session, at the end of a request under the grammar."""
    session = finished(solo(engine, replace(constrained(**options), keep=True))).session
    assert session is not None
    return session


def rest_of(engine: Engine, session: str, **options: Any) -> list[int]:
    """What the grammar makes of a session that continues without a new text."""
    rest = request("s", (), session, max_tokens=60, seed=SEED, **options)
    return tokens_of(solo(engine, rest))


PLACES = [1, 2, 15, 28, 29]


@pytest.mark.parametrize("place", PLACES)
def test_rest_is_the_same_after_a_pause(
    make: MakeEngine, matchers: FakeMatchers, whole: list[int], place: int
) -> None:
    engine = make(max_sessions=1, max_asleep=2)
    seen = begun(engine, place)
    before = matchers.num_made
    engine.park("r")
    for index in range(2):  # each needs the slot
        solo(engine, request(f"other{index}", (5, 6)))
    engine.unpark("r")
    assert seen + tokens_of(drain(engine)["r"]) == whole
    assert matchers.num_made == before + 1  # it went with the slot


@pytest.mark.parametrize("grammar", ["700", "400"])
def test_long_texts_that_preempt_each_other_are_the_same(make: MakeEngine, grammar: str) -> None:
    """Each is preempted in its turn."""
    prompts = [(n, n + 1) for n in range(1, 4)]
    options = {"grammar": grammar, "max_tokens": 600, "seed": 1}
    alone = [tokens_of(solo(make(), constrained(prompt, **options))) for prompt in prompts]
    engine = make(max_sessions=1, max_asleep=4)
    for name, prompt in zip("abc", prompts, strict=True):
        engine.submit(replace(constrained(prompt, **options), request_id=name), 0.0)
    events = drain(engine)
    assert [tokens_of(events[name]) for name in "abc"] == alone
    assert engine.stats().preemptions_total > 0 or max(map(len, alone)) < 256


@pytest.mark.parametrize("save_interval", [1, 4, 10**6])
@pytest.mark.parametrize("place", PLACES)
def test_rest_is_the_same_after_a_crash(
    make: MakeEngine, whole: list[int], place: int, save_interval: int
) -> None:
    """From the log alone, and from a value and the end of the log."""
    ledger, engine = Ledger(), make(save_interval=save_interval)
    seen = begun(engine, place)
    ledger.take(engine.take_records())
    (session,) = ledger.entries
    for past in ledger.pasts(session):
        heir = make()
        heir.kept.restore(past, 0.0)
        assert constraint(heir, session) == Constraint(GRAMMAR, tuple(seen))
        heir.unpark("r")
        events = drain(heir)["r"]
        assert seen + tokens_of(events) == whole
        assert finished(events).grammar_ended
    drain(engine)


def test_whole_text_of_the_past_is_free(make: MakeEngine) -> None:
    ledger, engine = Ledger(), make()
    session = ended(engine)
    solo(engine, request("s", (5, 6), session))
    ledger.take(engine.take_records())
    past = ledger.past(session, 1 + len(PROMPT) + LENGTH)
    (copy,) = engine.kept.fork(session, "me", 1, 0.0, past)
    assert constraint(engine, copy.session) is None


def test_session_continues_on_another_server_under_its_grammar(
    make: MakeEngine, whole: list[int]
) -> None:
    engine, other = make(), make()
    session = ended(engine, max_tokens=9)
    adopted = other.kept.adopt(engine.kept.value(session, "me"), "you", 0.0).session
    assert whole[:9] + rest_of(other, adopted, owner="you") == whole


def test_session_with_an_unknown_grammar_fails_alone(
    make: MakeEngine, make_engine: MakeEngine
) -> None:
    engine, other = make(), make_engine()
    session = ended(engine, max_tokens=9)
    adopted = other.kept.adopt(engine.kept.value(session, "me"), "me", 0.0).session
    other.submit(request("s", (), adopted), 0.0)
    other.submit(request("peer"), 0.0)
    events = drain(other)
    assert finished(events["s"]).finish_reason == "error"
    assert finished(events["peer"]).finish_reason == "length"


def test_rewound_session_has_the_constraint_of_its_rewind_point(make: MakeEngine) -> None:
    """Also where a later request without text began at the same place, and was saved there."""
    ledger, engine = Ledger(), make(max_sessions=1, can_evict=True)
    session = ended(engine, max_tokens=9)
    before = constraint(engine, session)
    engine.submit(constrained((), session, grammar="3"), 0.0)
    engine.cancel("r")
    drain(engine)
    assert constraint(engine, session) == Constraint("3")
    ledger.take(engine.take_records())
    past = next(ledger.pasts(session, 1 + len(PROMPT) + 9))
    engine.kept.retire(1)
    ledger.take(engine.take_records())
    engine.kept.restore(ledger.past(session), 0.0)
    engine.kept.rewind(session, "me", past, 0.0)
    ledger.take(engine.take_records())
    assert constraint(engine, session) == before
    for way in ledger.pasts(session):
        heir = make()
        heir.kept.restore(way, 0.0)
        assert constraint(heir, session) == before


def test_within_its_prompt_a_session_of_the_past_was_under_no_grammar(make: MakeEngine) -> None:
    ledger, engine = Ledger(), make()
    session = ended(engine)
    ledger.take(engine.take_records())
    for at, wanted in ((2, None), (1 + len(PROMPT), Constraint(GRAMMAR))):
        (copy,) = engine.kept.fork(session, "me", 1, 0.0, ledger.past(session, at))
        assert constraint(engine, copy.session) == wanted
