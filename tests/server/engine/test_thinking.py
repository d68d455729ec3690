"""Turns of a chat in the engine: thinking, its budget, its end, and a grammar after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from server.engine.types import Event, Finished, Request, SamplingParams, TokenEvent, Turn
from tests.fakes import EOS, STATE_BYTES, ByteTokenizer, FakeEngine, state_after, told_after
from tests.server.engine.grammars import FakeMatchers
from tests.server.engine.ledger import Ledger, rebuilt, settled

PROMPT = tuple(b"User: hi\n\nAssistant: <think")
OPEN = Turn("<think>", "</think>", "open", ">", stop=("\nUser:",))
CLOSE = tuple(b"\n</think>\n")


def engine_of(text: str, **config: Any) -> FakeEngine:
    return FakeEngine(story=told_after(len(PROMPT), text), **config)


def play(engine: FakeEngine, turn: Turn = OPEN, **params: Any) -> tuple[list[Event], Finished]:
    sampling = SamplingParams(max_tokens=params.pop("max_tokens", 200), turn=turn, **params)
    engine.submit(Request("r", "me", PROMPT, sampling), 0.0)
    events: list[Event] = []
    while engine.has_work():
        events += engine.step(0.0)
    last = events[-1]
    assert isinstance(last, Finished), last
    return events, last


def shown(events: list[Event]) -> tuple[str, str]:
    """All of the thinking, and all of the answer."""
    told = [event for event in events if isinstance(event, TokenEvent | Finished)]
    return "".join(e.thought or "" for e in told), "".join(e.text for e in told)


def test_thinking_comes_apart_from_the_answer_and_is_counted() -> None:
    events, last = play(engine_of(">\nLet me see.\n</think>\nHello!"), stop=("me",))
    assert shown(events) == ("Let me see.", "Hello!")
    assert last.finish_reason == "stop"
    assert last.usage.reasoning_tokens == len(">\nLet me see.\n</think>")
    assert last.usage.completion_tokens == len(">\nLet me see.\n</think>\nHello!") + 1


@pytest.mark.parametrize("text", [">\nLet me", ">\nLet me\nUser: what", ">\nLet me</thin"])
def test_thinking_that_never_ends_is_all_there_is(text: str) -> None:
    events, last = play(engine_of(text))
    assert shown(events) == (text.partition("\nUser:")[0].removeprefix(">\n"), "")
    assert last.finish_reason == "stop"
    assert last.usage.reasoning_tokens == last.usage.completion_tokens


def test_thinking_that_is_cut_by_the_limit_is_shown_to_its_end() -> None:
    events, last = play(engine_of(">Let me see.</think>Hello!"), max_tokens=8)
    assert shown(events) == ("Let me", "")
    assert (last.finish_reason, last.usage.reasoning_tokens) == ("length", 8)


def test_token_with_text_ends_the_answer_alone() -> None:
    engine = engine_of(">Why?</think>\n\nHello? And more")
    events, last = play(engine, stop_token_ids=(ord("?"), ord("\n")))
    assert shown(events) == ("Why?", "Hello?")
    assert last.finish_reason == "stop"


def test_budget_forces_the_end_marker() -> None:
    turn = replace(OPEN, budget=7, close=CLOSE)
    events, last = play(engine_of(">Let me see, and see.</think>Hello!"), turn)
    drawn = [event.token_id for event in events if isinstance(event, TokenEvent)]
    assert bytes(drawn[:17]) == b">Let me" + bytes(CLOSE)
    assert shown(events)[0] == "Let me"
    assert last.usage.reasoning_tokens == len(">Let me\n</think>")


def test_budget_of_zero_skips_thinking() -> None:
    events, _ = play(engine_of("x" * 10 + "Hello!"), replace(OPEN, budget=0, close=CLOSE))
    assert shown(events) == ("", "Hello!")


def test_forced_end_leaves_the_same_state_as_one_that_was_drawn() -> None:
    drawn, _ = play(engine_of(">Let me\n</think>\nHello!"))
    forced, _ = play(engine_of(">Let me??????????Hello!"), replace(OPEN, budget=7, close=CLOSE))
    ids = [[e.token_id for e in events if isinstance(e, TokenEvent)] for events in (drawn, forced)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("budget", [None, 7])
def test_grammar_begins_after_the_thinking(budget: int | None) -> None:
    matchers = FakeMatchers(ByteTokenizer.vocab_size, EOS)
    turn = replace(OPEN, budget=budget, close=CLOSE, gap=CLOSE[-1:])
    engine = engine_of(">Let me see.</think>Hello! And more of it", matchers=matchers)
    events, last = play(engine, turn, grammar="5")
    text = b">Let me\n</think>\n" if budget else b">Let me see.</think>\n"
    ids = [event.token_id for event in events if isinstance(event, TokenEvent)]
    assert bytes(ids[: len(text)]) == text
    matcher = matchers("5")
    for id in ids[len(text) :]:
        matcher.accept(id)
    assert matcher.is_over() and last.grammar_ended


def test_text_does_not_end_in_its_thinking_where_a_grammar_is_waiting() -> None:
    matchers = FakeMatchers(ByteTokenizer.vocab_size, EOS)
    turn = replace(OPEN, stop=(), budget=20, close=CLOSE)
    _, last = play(engine_of(">Let me", matchers=matchers), turn, grammar="5")
    assert last.grammar_ended


@pytest.mark.parametrize("prompted", ["", "closed"])
def test_grammar_begins_at_once_where_the_prompt_has_not_begun_to_think(
    prompted: Literal["", "closed"],
) -> None:
    matchers = FakeMatchers(ByteTokenizer.vocab_size, EOS)
    events, last = play(
        engine_of("Hello!", matchers=matchers), replace(OPEN, prompted=prompted), grammar="5"
    )
    matcher = matchers("5")
    for event in events:
        if isinstance(event, TokenEvent):
            matcher.accept(event.token_id)
    assert matcher.is_over() and last.grammar_ended


@pytest.mark.parametrize("grammar", [None, "5"])
@pytest.mark.parametrize("budget", [None, 9])
def test_session_can_be_built_again_at_every_moment_of_a_turn(
    grammar: str | None, budget: int | None
) -> None:
    matchers = FakeMatchers(ByteTokenizer.vocab_size, EOS)
    text = ">\nWell\n\nsee < \n</think>\n\nHello\n\nUser: more"
    engine = engine_of(text, matchers=matchers, save_interval=5, can_evict=True)
    session = engine.kept.create("me", 0.0).session
    turn = replace(OPEN, budget=budget, close=CLOSE, gap=CLOSE[-1:])
    params = SamplingParams(turn=turn, stop=("\n\n",), grammar=grammar)
    engine.submit(Request("r", "me", PROMPT, params, session), 0.0)
    ledger = Ledger()
    while True:
        ledger.take(engine.take_records())
        wanted = settled(engine.kept.value(session, "me"), digest)
        for past in ledger.pasts(session):
            assert settled(rebuilt(past, engine.tokenizer), digest) == wanted
        if not engine.has_work():
            break
        engine.step(0.0)
    assert len(ledger.entries[session]) > 30


def digest(state: Any, tokens: Any) -> bytes:
    start = bytes(STATE_BYTES) if state is None else state.data.tobytes()
    return state_after(tokens, start)


def test_turn_continues_after_a_crash() -> None:
    text = ">\nWell, let me see.\n</think>\nHello!\n\nUser: more"
    params = SamplingParams(turn=OPEN, stop=("\n\n",), max_tokens=200)
    for num_steps in range(1, len(text), 3):
        first = engine_of(text, save_interval=4, can_evict=True)
        session = first.kept.create("me", 0.0).session
        first.submit(Request("r", "me", PROMPT, params, session), 0.0)
        events = [event for _ in range(num_steps) for event in first.step(0.0)]
        ledger = Ledger()
        ledger.take(first.take_records())
        second = engine_of(text)
        second.kept.restore(ledger.past(session), 0.0)
        second.attach(session, "me", "again", take_over=False)
        second.unpark("again")
        while second.has_work():
            events += second.step(0.0)
        assert shown(events) == ("Well, let me see.", "Hello!"), num_steps
        last = events[-1]
        assert isinstance(last, Finished)
        assert last.usage.reasoning_tokens == len(">\nWell, let me see.\n</think>")
