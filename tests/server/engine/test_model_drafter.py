"""Drafts of a small model: right where it draws the same, and no bit hangs on them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from server.engine.drafts import MAX_STREAMS, DraftCosts
from server.engine.engine import Engine
from server.engine.model_drafter import RETRY_TOKENS, ModelDrafter
from server.engine.sampling import PENALTY_WINDOW
from server.engine.session import Past
from server.engine.types import Dry, EngineStats
from tests.reliability.faulty_runner import FaultyRunner
from tests.requirements import needs_native
from tests.server.engine.drafters import CHEAP, NEVER, model_drafter
from tests.server.engine.grammars import EOS, VOCAB_SIZE, FakeMatchers
from tests.server.engine.test_drafts import comparable, requests, run
from tests.tiny import (
    drain,
    request,
    started,
    tiny_engine,
    tiny_runtime,
    tokens_of,
)

pytestmark = needs_native

#: Draws as the model that it drafts for, and as none.
SAME, OTHER = "gated", "rwkv7"
PROMPT = (10, 20, 30)


def make_engine(drafter: ModelDrafter | None, **options: Any) -> Engine:
    matchers = FakeMatchers(VOCAB_SIZE, EOS)
    options = {"max_waiting": 90, "matchers": matchers, "runtime": tiny_runtime(), **options}
    return tiny_engine(drafter=drafter, **options)


def counts(stats: EngineStats) -> tuple[int, int]:
    return stats.accepted_model_drafts_total, stats.rejected_model_drafts_total


@pytest.mark.parametrize("draft", [SAME, OTHER])
@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize("past", [CHEAP, NEVER])
def test_events_of_any_request_are_those_without_drafts(
    draft: str, first: int, past: DraftCosts
) -> None:
    made = requests()[first : first + 6]
    plain, _ = run(make_engine(None), made)
    engine = make_engine(model_drafter(draft, past=past))
    drafted, _ = run(engine, made)
    assert comparable(drafted) == comparable(plain)
    assert sum(counts(engine.stats())) > 0


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"seed": 5},
        {"seed": 6, "temperature": 1.7, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"seed": 8, "top_n_sigma": 2.0},
        {"seed": 9, "xtc_probability": 0.5, "dry": Dry(2.0, allowed_length=1)},
        {"seed": 7, "top_p": 0.8, "logit_bias": ((5, 3.0),)},
    ],
)
def test_model_that_draws_the_same_is_always_right(sampling: dict[str, Any]) -> None:
    """Seed, position, penalties and all: of 60 tokens one is drawn without a draft before it."""
    engine = make_engine(model_drafter(SAME))
    run(engine, [request("r", PROMPT, max_tokens=60, **sampling)])
    accepted, rejected = counts(engine.stats())
    assert rejected == 0
    assert accepted >= 50


def test_total_counts_drafts_of_both_sources() -> None:
    engine = make_engine(model_drafter(SAME, past=CHEAP))
    bias = tuple((id, 90.0) for id in (33, 34))  # a text that repeats itself
    run(engine, [request("r", PROMPT, logit_bias=bias, max_tokens=60, seed=1)])
    stats = engine.stats()
    assert 0 < sum(counts(stats)) < stats.accepted_drafts_total + stats.rejected_drafts_total


def test_request_without_speculation_gets_no_drafts() -> None:
    engine = make_engine(model_drafter(SAME))
    run(engine, [replace(request("r", PROMPT, max_tokens=30), speculation=False)])
    assert counts(engine.stats()) == (0, 0)


@pytest.mark.parametrize("draft", [SAME, OTHER])
def test_fork_rewind_and_restore_in_the_middle(draft: str) -> None:
    first = request("r", PROMPT, seed=3, keep=True, max_tokens=50)
    events, _ = run(make_engine(None), [first])
    whole = [*started(events["r"]).start, *PROMPT, *tokens_of(events["r"])]
    for num_steps in (1, 2, 3):
        engine = make_engine(model_drafter(draft))
        engine.submit(first, 0.0)
        for _ in range(num_steps):
            engine.step(0.0)
        (found,) = engine._sessions
        length = found.length
        (fork,) = engine.kept.fork(found.id, "me", 1, 0.0)
        value = engine.kept.value(found.id, "me")
        drain(engine)
        engine.kept.rewind(found.id, "me", Past(replace(value, progress=None)), 0.0)
        other = make_engine(model_drafter(draft))
        other.kept.restore(Past(value), 0.0)
        other.unpark("r")
        assert [*whole[:length], *tokens_of(drain(other)["r"])] == whole
        for session in (fork.session, found.id):
            again = request("go on", (), session, seed=3, max_tokens=len(whole) - length)
            engine.submit(again, 0.0)
            assert [*whole[:length], *tokens_of(drain(engine)["go on"])] == whole
        if draft == SAME:
            assert counts(engine.stats())[1] == counts(other.stats())[1] == 0


def test_long_text_is_read_from_its_tail() -> None:
    made = request("r", tuple(range(5, 200)) * 3, seed=2, max_tokens=60)
    plain, _ = run(make_engine(None), [made])
    engine = make_engine(model_drafter(SAME))
    drafted, _ = run(engine, [made])
    assert len(made.tokens) > 2 * PENALTY_WINDOW
    assert comparable(drafted) == comparable(plain)
    assert sum(counts(engine.stats())) > 0


def test_more_sessions_than_states_take_turns() -> None:
    drafter = model_drafter(SAME, num_slots=2)
    made = [request(f"r{i}", (20 + i,), seed=i, max_tokens=20) for i in range(5)]
    plain, _ = run(make_engine(None), made)
    engine = make_engine(drafter)
    drafted, _ = run(engine, made)
    assert comparable(drafted) == comparable(plain)
    assert counts(engine.stats())[0] > 0


def test_model_that_is_mostly_wrong_stops_and_is_tried_again() -> None:
    costs = DraftCosts((1.0, 1.03, 1.09, 1.2, 1.5), 0.03, draft_s=0.2)
    engine = make_engine(model_drafter(OTHER, costs))
    run(engine, [request("r", PROMPT, seed=1, max_tokens=RETRY_TOKENS)])
    first = sum(counts(engine.stats()))
    assert 0 < first < 60
    run(engine, [request("r", PROMPT, seed=1, max_tokens=RETRY_TOKENS + 100)])
    again = sum(counts(engine.stats())) - first
    assert first < again < 2 * 60


def test_no_drafts_where_they_take_longer_than_tokens() -> None:
    costs = DraftCosts((1.0, 1.03, 1.09, 1.2, 1.5), draft_s=1.0)
    engine = make_engine(model_drafter(SAME, costs))
    run(engine, [request("r", PROMPT, max_tokens=30)])
    assert counts(engine.stats()) == (0, 0)


def test_draft_model_that_fails_drafts_no_more(caplog: pytest.LogCaptureFixture) -> None:
    drafter = model_drafter(SAME)
    fails = FaultyRunner(drafter._runner, lambda feeds: None)
    drafter._runner = fails
    made = [request("r", PROMPT, seed=4, max_tokens=40)]
    plain, _ = run(make_engine(None), made)
    engine = make_engine(drafter)
    engine.submit(made[0], 0.0)
    events: list[Any] = [*engine.step(0.0), *engine.step(0.0)]
    fails.fault = lambda feeds: RuntimeError("out of luck")
    with caplog.at_level(logging.ERROR, "everstream.engine"):
        events += drain(engine)["r"]
    assert tokens_of(events) == tokens_of(plain["r"])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "the draft model or head failed; it drafts no more"


def test_events_of_many_streams() -> None:
    """As many as have states, and one more, with which nothing is drafted."""
    for number in (MAX_STREAMS, MAX_STREAMS + 1):
        made = [request(f"r{i}", (20 + i,), seed=i, max_tokens=20) for i in range(number)]
        plain, _ = run(make_engine(None), made)
        engine = make_engine(model_drafter(SAME))
        drafted, _ = run(engine, made)
        assert comparable(drafted) == comparable(plain)
        assert (counts(engine.stats())[0] > 0) == (number == MAX_STREAMS)
