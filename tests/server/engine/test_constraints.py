"""Texts under a grammar: what may come, when they end, and what that is to others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from server.engine.engine import Engine
from server.engine.session import Constraint, OpenConstraint
from tests.fakes import FakeRuntime
from tests.server.engine.grammars import (
    EOS,
    GRAMMAR,
    LENGTH,
    PROMPT,
    SEED,
    TIGHT,
    VOCAB_SIZE,
    FakeMatchers,
    constrained,
    constraint,
    follow,
)
from tests.tiny import drain, finished, request, solo, text_of, tokens_of

MakeEngine = Callable[..., Engine]


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(VOCAB_SIZE)


@pytest.fixture
def make(make_engine: MakeEngine, matchers: FakeMatchers) -> MakeEngine:
    return lambda **config: make_engine(**{"matchers": matchers, **config})


@pytest.fixture
def engine(make: MakeEngine) -> Engine:
    return make()


@pytest.fixture
def whole(make: MakeEngine) -> list[int]:
    """What the grammar makes of `PROMPT`, left alone: all that it may hold."""
    events = solo(make(), constrained())
    assert finished(events).finish_reason == "stop"
    assert len(tokens_of(events)) == LENGTH
    return tokens_of(events)


def test_every_token_is_one_that_the_grammar_allows(engine: Engine, whole: list[int]) -> None:
    assert follow(whole).is_over()
    assert whole != tokens_of(solo(engine, request("r", PROMPT, max_tokens=LENGTH, seed=SEED)))


@pytest.mark.parametrize("num", [1, 2, LENGTH - 1])
def test_matcher_knows_how_many_tokens_are_left(engine: Engine, num: int) -> None:
    tight = constrained(max_tokens=num, grammar=f"{GRAMMAR}/{TIGHT}")
    *before, last = tokens_of(solo(engine, tight))
    assert len(before) == num - 1
    assert last == follow(before).ids()[0]


def test_end_of_text_ends_it_where_the_grammar_allows_that(engine: Engine) -> None:
    """Also for a request that ignores such ends otherwise, as these here do."""
    texts = [solo(engine, constrained(seed=seed)) for seed in range(40)]
    ended = [tokens_of(events) for events in texts if tokens_of(events)[-1] == EOS]
    assert ended
    assert all(finished(events).finish_reason == "stop" for events in texts)
    for tokens in ended:
        assert EOS in follow(tokens[:-1]).ids()


def test_silent_end_may_come_exactly_where_the_end_of_text_may(
    matchers: FakeMatchers, whole: list[int]
) -> None:
    """As a chat template's end of turn, which no grammar knows."""
    ends = EOS, VOCAB_SIZE - 1
    could_end = []
    for length in range(LENGTH):
        place, plain = OpenConstraint(GRAMMAR, whole[:length]), follow(whole[:length])
        mask = place.allowed(matchers, LENGTH, ends)
        allowed = {id for id in range(VOCAB_SIZE) if mask[id // 32] >> (id % 32) & 1}
        could_end.append(EOS in plain.ids())
        assert allowed == {*plain.ids(), *(ends if could_end[-1] else ())}
        assert place.accept(ends[1], ends, matchers)
        assert place.tokens == whole[:length]
    assert {*could_end} == {True, False}


def test_request_knows_its_silent_ends(engine: Engine) -> None:
    text = next(id for id in range(VOCAB_SIZE) if engine.tokenizer.token_bytes(id))
    engine.submit(constrained(stop_token_ids=(text,)), 0.0)
    (live,) = engine._requests
    assert live.silent_ends == (EOS,)
    assert text in live.ends


def test_kept_session_is_free_after_its_end(engine: Engine, whole: list[int]) -> None:
    last = finished(solo(engine, replace(constrained(), keep=True)))
    assert last.grammar_ended
    assert last.session is not None
    assert constraint(engine, last.session) is None
    free = tokens_of(solo(engine, request("s", (), last.session)))
    text = (*PROMPT, *whole)
    assert free == tokens_of(solo(engine, request("s", text)))


@pytest.mark.parametrize("length", [1, 7, 29])
def test_truncated_text_continues_under_its_grammar(
    engine: Engine, whole: list[int], length: int
) -> None:
    last = finished(solo(engine, replace(constrained(max_tokens=length), keep=True)))
    assert (last.finish_reason, last.grammar_ended) == ("length", False)
    assert last.session is not None
    assert constraint(engine, last.session) == Constraint(GRAMMAR, tuple(whole[:length]))
    rest = solo(engine, request("s", (), last.session, max_tokens=60, seed=SEED))
    assert whole[:length] + tokens_of(rest) == whole
    assert finished(rest).finish_reason == "stop"


def test_another_grammar_starts_from_its_beginning(engine: Engine) -> None:
    session = finished(solo(engine, replace(constrained(max_tokens=5), keep=True))).session
    found = tokens_of(solo(engine, constrained((), session, grammar="3", seed=2)))
    assert follow(found, "3").is_over() or found[-1] == EOS


def test_stop_string_leaves_it_open(engine: Engine, whole: list[int]) -> None:
    stop = text_of(solo(engine, constrained(max_tokens=12)))[-2:]
    last = finished(solo(engine, replace(constrained(stop=(stop,)), keep=True)))
    assert (last.finish_reason, last.grammar_ended) == ("stop", False)
    assert last.session is not None
    seen = last.usage.completion_tokens
    rest = tokens_of(solo(engine, request("s", (), last.session, max_tokens=60, seed=SEED)))
    assert whole[:seen] + rest == whole


@pytest.mark.parametrize("fault", ["start", "allowed", "accept"])
def test_error_of_a_matcher_ends_that_request_alone(engine: Engine, fault: str) -> None:
    alone = tokens_of(solo(engine, request("peer", max_tokens=40)))
    engine.submit(request("peer", max_tokens=40), 0.0)
    engine.submit(replace(constrained(grammar=f"20/{fault}"), keep=True), 0.0)
    engine.submit(replace(constrained(), request_id="other"), 0.0)
    events = drain(engine)
    last = finished(events["r"])
    assert last.finish_reason == "error"
    assert len(tokens_of(events["r"])) == {"start": 0, "allowed": 10, "accept": 10}[fault]
    assert tokens_of(events["peer"]) == alone
    assert finished(events["other"]).finish_reason == "stop"
    assert engine.stats().num_sessions == 0  # a store continues from what it has


def test_only_sessions_with_a_grammar_have_matchers(engine: Engine, matchers: FakeMatchers) -> None:
    solo(engine, request("free", max_tokens=40))
    assert matchers.num_made == 0
    solo(engine, constrained())
    assert matchers.num_made == 1
