"""Drafts change how many steps a text takes, and nothing else: not a bit, event, record or count.

On the native runtime, against the same requests without a drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from server.engine.engine import Engine
from server.engine.session import Past, Record
from server.engine.types import Dry, Event, Finished, Request, Started, TokenEvent, Turn
from tests.reliability.faulty_runner import FaultyRunner, never
from tests.requirements import needs_native
from tests.server.engine.drafters import KINDS, MAX_DRAFTS, ScriptedDrafter
from tests.server.engine.grammars import EOS, GRAMMAR, SEED, VOCAB_SIZE, FakeMatchers
from tests.tiny import (
    check_books,
    drain,
    request,
    started,
    state_of,
    tiny_engine,
    tiny_runtime,
    tiny_tokenizer,
    tokens_of,
)

pytestmark = needs_native

#: A request for each thing that a draft could disturb.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 40},
    "sampled": {"seed": 5, "max_tokens": 40},
    "top-n-sigma": {"seed": 5, "top_n_sigma": 1.5, "max_tokens": 40},
    "xtc": {"seed": 5, "xtc_probability": 0.5, "xtc_threshold": 0.02, "max_tokens": 40},
    "dry": {"temperature": 0.0, "dry": Dry(2.0, allowed_length=1, breakers=(7,)), "max_tokens": 60},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "max_tokens": 40},
    "stop": {"stop": ("e", "th"), "seed": 8, "max_tokens": 60},
    "stop ids": {"stop_token_ids": tuple(range(3, 300, 17)), "seed": 1, "max_tokens": 60},
    "end of text": {"ignore_eos": False, "logit_bias": ((EOS, 4.0),), "max_tokens": 200},
    "one token": {"max_tokens": 1},
    "grammar": {"grammar": GRAMMAR, "seed": SEED, "max_tokens": 60},
    "tight grammar": {"grammar": "30/tight", "seed": SEED, "max_tokens": 12},
    "logprobs": {"top_logprobs": 3, "logprob": True, "seed": 2, "max_tokens": 20},
    "thinking": {"turn": Turn("<t>", "</t>", "open", budget=9, close=(70, 71)), "max_tokens": 30},
    "turn": {"turn": Turn("<t>", "</t>", "closed"), "seed": 3, "max_tokens": 30},
}


def requests(keep: bool = False) -> list[Request]:
    made = [
        request(name, (10, 20, 30 + i), keep=keep, **sampling)
        for i, (name, sampling) in enumerate(REQUESTS.items())
    ]
    if keep:
        return made
    return [*made, replace(request("choices", (4, 5), seed=6, max_tokens=20), num_choices=3)]


def make_engine(drafter: ScriptedDrafter | None = None, **options: Any) -> Engine:
    matchers = FakeMatchers(VOCAB_SIZE, EOS)
    options = {"max_waiting": 20, "matchers": matchers, "runtime": tiny_runtime(), **options}
    return tiny_engine(drafter=drafter, **options)


def run(engine: Engine, made: Sequence[Request]) -> tuple[dict[str, list[Event]], list[Record]]:
    for each in made:
        engine.submit(each, 0.0)
    events = drain(engine)
    check_books(engine)
    return events, engine.take_records()


def texts_of(engine: Engine, made: Sequence[Request]) -> dict[str, Sequence[int]]:
    """The whole text of each request, prompt and start token included."""
    events, _ = run(engine, made)
    texts: dict[str, Sequence[int]] = {}
    for one in made:
        for id in one.ids:
            texts[id] = [
                *started(events[one.request_id]).start,
                *one.tokens,
                *tokens_of(events[id]),
            ]
    return texts


def comparable(events: dict[str, list[Event]]) -> dict[str, list[Event]]:
    """Without the names of sessions, which differ, and without the counts of drafts."""
    return {name: [_comparable(event) for event in one] for name, one in events.items()}


def _comparable(event: Event) -> Event:
    if isinstance(event, Finished):
        usage = replace(event.usage, accepted_tokens=0, rejected_tokens=0)
        return replace(event, session="", usage=usage)
    return replace(event, session="") if isinstance(event, Started) else event


def test_events_of_any_request_are_those_without_drafts() -> None:
    """All in one batch: rows with drafts, rows without, and prompts."""
    plain, _ = run(make_engine(), requests())
    drafter = ScriptedDrafter(VOCAB_SIZE, texts_of(make_engine(), requests()))
    drafted_engine = make_engine(drafter)
    drafted, _ = run(drafted_engine, requests())
    assert comparable(drafted) == comparable(plain)
    reasons = {one[-1].finish_reason for one in plain.values() if isinstance(one[-1], Finished)}
    assert reasons == {"stop", "length"}
    assert drafter.num_proposed > 200


@pytest.mark.parametrize("kind", sorted({kind for kind in KINDS if kind != "none"}, key=str))
@pytest.mark.parametrize("name", ["greedy", "stop", "grammar", "end of text", "penalties"])
def test_events_alone(name: str, kind: int | str) -> None:
    made = [one for one in requests() if one.request_id == name]
    drafter = ScriptedDrafter(VOCAB_SIZE, texts_of(make_engine(), made), [kind])
    plain, _ = run(make_engine(), made)
    drafted, _ = run(make_engine(drafter), made)
    assert comparable(drafted) == comparable(plain)


def test_records_states_and_usage_are_those_without_drafts() -> None:
    """A state that the drafts have run past is where the text is, at the end of each request."""
    plain, drafted = make_engine(), None
    made = requests(keep=True)
    texts = texts_of(make_engine(), made)
    drafted = make_engine(ScriptedDrafter(VOCAB_SIZE, texts))
    results = []
    for engine in (plain, drafted):
        events, records = run(engine, made)
        sessions = {name: started(one).session for name, one in events.items()}
        entries = {
            name: [entry for id, entry in records if id == session and _is_numbered(entry)]
            for name, session in sessions.items()
        }
        for session in sessions.values():  # what is unfed is fed, as the next request would
            engine.submit(request(session, (7,), session, keep=True, generate=False), 0.0)
        drain(engine)
        states = {name: state_of(engine, session) for name, session in sessions.items()}
        results.append((comparable(entries), states, engine.take_usage()))
    assert results[0] == results[1]


@pytest.mark.parametrize("fault", ["allowed", "accept"])
def test_matcher_that_fails_further_on_takes_no_token_before_that(fault: str) -> None:
    made = [request("r", (10, 20, 30), grammar=f"30/{fault}", seed=SEED, max_tokens=60)]
    plain, _ = run(make_engine(), made)
    assert len(tokens_of(plain["r"])) > 9
    drafted, _ = run(make_engine(ScriptedDrafter(VOCAB_SIZE, texts_of(make_engine(), made))), made)
    assert comparable(drafted) == comparable(plain)


def _is_numbered(entry: object) -> bool:
    return isinstance(entry, TokenEvent | Finished)


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    made = [request("r", seed=3, max_tokens=60)]
    texts = texts_of(make_engine(), made)
    steps = {}
    for kinds in (["none"], [0], [MAX_DRAFTS]):
        engine = make_engine(ScriptedDrafter(VOCAB_SIZE, texts, kinds))
        engine.submit(made[0], 0.0)
        longest = steps[kinds[0]] = 0
        while engine.has_work():
            engine.step(0.0)
            steps[kinds[0]] += 1
            longest = max(longest, engine.longest_row)
        assert longest == (MAX_DRAFTS + 1 if kinds == [MAX_DRAFTS] else 1)
    assert steps[0] == steps["none"] == 60
    # The first row has the prompt, too, and so draws 3; the others draw 6 each.
    assert steps[MAX_DRAFTS] == 1 + 57 // 6 + 1


@pytest.mark.parametrize("kinds", [[MAX_DRAFTS], KINDS])
def test_thinking_has_drafts_up_to_the_end_of_its_budget(kinds: Sequence[int | str]) -> None:
    """What is forced then is not drafted; what comes after it is."""
    turn = Turn("<t>", "</t>", "open", budget=23, close=tuple(tiny_tokenizer().encode("</t>")))
    made = [request("r", (10, 20, 30), seed=3, turn=turn, max_tokens=60)]
    plain, _ = run(make_engine(), made)
    texts = texts_of(make_engine(), made)
    engine = make_engine(ScriptedDrafter(VOCAB_SIZE, texts, kinds))
    engine.submit(made[0], 0.0)
    events: list[Event] = []
    most_thought = most = 0
    while engine.has_work():
        got = engine.step(0.0)
        tokens = [event for event in got if isinstance(event, TokenEvent)]
        most_thought = max(most_thought, sum(event.thought is not None for event in tokens))
        most = max(most, sum(event.thought is None for event in tokens))
        events += got
    assert comparable({"r": events}) == comparable(plain)
    assert most_thought > 3
    assert most > 3


@pytest.mark.parametrize("kinds", [[0], [MAX_DRAFTS], KINDS])
def test_fork_rewind_and_restore_in_the_middle(kinds: Sequence[int | str]) -> None:
    """Whatever the drafts have left unfed at that moment."""
    first = request("r", seed=3, keep=True, max_tokens=50)
    texts = texts_of(make_engine(), [first])
    whole = texts["r"]
    for num_steps in range(1, 9):
        engine = make_engine(ScriptedDrafter(VOCAB_SIZE, {**texts, "go on": whole}, kinds))
        engine.submit(first, 0.0)
        for _ in range(num_steps):
            engine.step(0.0)
        (found,) = engine._sessions
        length = found.length
        (fork,) = engine.kept.fork(found.id, "me", 1, 0.0)
        value = engine.kept.value(found.id, "me")
        drain(engine)
        rewound = engine.kept.rewind(found.id, "me", Past(replace(value, progress=None)), 0.0)
        assert (fork.position, rewound.position) == (length, length)
        other = make_engine(ScriptedDrafter(VOCAB_SIZE, texts, kinds))
        other.kept.restore(Past(value), 0.0)
        other.unpark("r")
        assert [*whole[:length], *tokens_of(drain(other)["r"])] == whole
        for session in (fork.session, found.id):
            again = request("go on", (), session, seed=3, max_tokens=53 - length + 1)
            engine.submit(again, 0.0)
            assert [*whole[:length], *tokens_of(drain(engine)["go on"])] == whole


def test_request_that_is_cancelled_or_parked_between_rejected_drafts() -> None:
    made = request("r", seed=3, keep=True, max_tokens=50)
    texts = texts_of(make_engine(), [made])
    for num_steps in range(2, 9):
        engine = make_engine(ScriptedDrafter(VOCAB_SIZE, texts, [2, 0, "random"]))
        engine.submit(made, 0.0)
        got: list[int] = []
        for _ in range(num_steps):
            got += tokens_of(engine.step(0.0))
        engine.park("r")
        engine.step(0.0)
        engine.unpark("r")
        got += tokens_of(engine.step(0.0))
        engine.cancel("r")
        got += tokens_of(drain(engine)["r"])
        (session,) = engine._sessions
        assert session.length == 4 + len(got)
        assert got == list(texts["r"][4 : 4 + len(got)])


def test_reader_that_is_away_parks_after_the_same_tokens() -> None:
    made = request("r", seed=3, keep=True, max_tokens=50)
    texts = texts_of(make_engine(), [made])
    engine = make_engine(ScriptedDrafter(VOCAB_SIZE, texts, [MAX_DRAFTS]), max_detached_tokens=7)
    engine.submit(made, 0.0)
    got = tokens_of(engine.step(0.0))
    engine.detach("r")
    events = drain(engine)["r"]
    assert len(tokens_of(events)) == 7
    assert [*got, *tokens_of(events)] == list(texts["r"][4 : 4 + len(got) + 7])
    assert engine.stats().num_parked == 1


def test_failing_call_repeats_each_row_with_its_drafts() -> None:
    made = requests()[:5]
    plain, _ = run(make_engine(), made)
    texts = texts_of(make_engine(), made)
    runners: list[FaultyRunner] = []

    def wrap(runner: Any) -> FaultyRunner:
        runners.append(FaultyRunner(runner, never))
        return runners[-1]

    engine = make_engine(ScriptedDrafter(VOCAB_SIZE, texts), wrap=wrap)
    runners[0].fault = lambda feeds: RuntimeError("several rows") if len(feeds) > 1 else None
    drafted, _ = run(engine, made)
    assert comparable(drafted) == comparable(plain)


def test_out_of_memory_with_drafts_ends_the_newest_alone() -> None:
    made = requests()[:4]
    plain, _ = run(make_engine(), made)
    runners: list[FaultyRunner] = []

    def wrap(runner: Any) -> FaultyRunner:
        runners.append(FaultyRunner(runner, never))
        return runners[-1]

    engine = make_engine(ScriptedDrafter(VOCAB_SIZE, texts_of(make_engine(), made)), wrap=wrap)
    runners[0].fault = lambda feeds: MemoryError() if len(feeds) > 3 else None
    drafted, _ = run(engine, made)
    newest = made[-1].request_id
    assert not tokens_of(drafted.pop(newest))
    del plain[newest]
    assert comparable(drafted) == comparable(plain)
