"""Drafts from a text's own past: what is proposed, when none are, and that no bit changes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from server.constraints.compiler import FormatCompiler
from server.constraints.grammar import Vocabulary, grammar_text, with_costs
from server.engine.drafts import (
    CERTAIN,
    MAX_FORCED_IDS,
    MAX_INDEXES,
    MAX_REST,
    MAX_STREAMS,
    DraftCosts,
    Stream,
    SuffixDrafter,
    SuffixIndex,
    few_ids,
    longest_of,
    place_of,
)
from server.engine.engine import Engine
from server.engine.session import Matcher, Past
from server.engine.types import Finished, Request, Usage
from tests.requirements import needs_native
from tests.server.engine.grammars import EOS, VOCAB_SIZE, FakeMatchers
from tests.server.engine.test_drafts import comparable, requests, run
from tests.tiny import (
    check_books,
    drain,
    request,
    started,
    tiny_engine,
    tiny_runtime,
    tiny_tokenizer,
    tokens_of,
)

pytestmark = needs_native

#: Rows cost next to nothing: whatever may be right is drafted.
CHEAP = DraftCosts((1.0, 1.0, 1.0, 1.0, 1.0))
PASSAGE = tuple(range(20, 60))


def make_engine(costs: DraftCosts | None = CHEAP, **options: Any) -> Engine:
    drafter = None if costs is None else SuffixDrafter(costs, tiny_tokenizer().token_bytes)
    matchers = FakeMatchers(VOCAB_SIZE, EOS)
    options = {"max_waiting": 90, "matchers": matchers, "runtime": tiny_runtime(), **options}
    return tiny_engine(drafter=drafter, **options)


def repeating(name: str = "r", tokens: Sequence[int] = PASSAGE, **sampling: Any) -> Request:
    """A request whose text is forced to be a loop: a bias leaves three tokens."""
    bias = tuple((id, 90.0) for id in (33, 34))
    return request(name, tokens, logit_bias=bias, **{"max_tokens": 60, **sampling})


def usage_of(engine: Engine, made: Request) -> Usage:
    events, _ = run(engine, [made])
    last = events[made.request_id][-1]
    assert isinstance(last, Finished)
    return last.usage


def num_steps(engine: Engine, made: Request) -> int:
    engine.submit(made, 0.0)
    steps = 0
    while engine.has_work():
        engine.step(0.0)
        steps += 1
    check_books(engine)
    return steps


def test_events_of_any_request_are_those_without_drafts() -> None:
    made = [*requests()[:3], *(repeating(f"loop {i}", seed=i) for i in range(3))]
    plain, _ = run(make_engine(None), made)
    engine = make_engine()
    drafted, _ = run(engine, made)
    assert comparable(drafted) == comparable(plain)
    assert engine.stats().accepted_drafts_total > 20


def test_repeating_text_takes_fewer_steps() -> None:
    greedy = repeating(temperature=0.0)
    assert num_steps(make_engine(None), greedy) == 60
    assert num_steps(make_engine(), greedy) < 30


def test_text_that_repeats_nothing_is_looked_up_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = []

    def find(self: Stream, limit: int) -> list[int]:
        lengths.append(self.length)
        return []

    monkeypatch.setattr(Stream, "find", find)
    run(make_engine(), [repeating()])
    gaps = [after - before for before, after in pairwise(lengths)]
    assert gaps[:MAX_REST] == list(range(1, MAX_REST + 1))
    assert len(gaps) > MAX_REST and set(gaps[MAX_REST:]) == {MAX_REST}


def test_next_turn_knows_an_answer_that_was_not_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also its last tokens, after which the text was not looked up any more."""
    engine, read = make_engine(), list[int]()
    extend = SuffixIndex.extend

    def extended(self: SuffixIndex, tokens: Sequence[int]) -> None:
        read.extend(tokens)
        extend(self, tokens)

    monkeypatch.setattr(Stream, "find", lambda self, limit: [])
    monkeypatch.setattr(SuffixIndex, "extend", extended)
    first, _ = run(engine, [repeating("first", max_tokens=20, keep=True)])
    answer, session = first["first"], started(first["first"]).session
    text = [*started(answer).start, *PASSAGE, *tokens_of(answer)]
    assert read == text[: len(read)] != text
    second, _ = run(engine, [request("second", (5, 6, 7), session=session, max_tokens=4)])
    text += [5, 6, 7, *tokens_of(second["second"])]
    assert read == text[: len(read)]
    assert len(read) > len(text) - 5


def test_usage_and_totals_count_drafts() -> None:
    engine = make_engine()
    usage = usage_of(engine, repeating())
    stats = engine.stats()
    assert (usage.accepted_tokens, usage.rejected_tokens) == (
        stats.accepted_drafts_total,
        stats.rejected_drafts_total,
    )
    assert 0 < usage.accepted_tokens < usage.completion_tokens == 60
    assert usage.rejected_tokens > 0


def test_request_without_speculation_gets_no_drafts() -> None:
    engine = make_engine()
    usage = usage_of(engine, replace(repeating(), speculation=False))
    assert (usage.accepted_tokens, usage.rejected_tokens) == (0, 0)


def test_no_drafts_where_rows_cost_as_much_as_calls() -> None:
    usage = usage_of(make_engine(DraftCosts((1.0, 2.0, 4.0, 8.0, 16.0))), repeating())
    assert (usage.accepted_tokens, usage.rejected_tokens) == (0, 0)


def test_no_drafts_while_many_streams_run() -> None:
    engine = make_engine(max_sessions=MAX_STREAMS + 1)
    made = [repeating(f"r{i}", (20 + i,), temperature=0.0) for i in range(MAX_STREAMS + 1)]
    plain, _ = run(make_engine(None, max_sessions=MAX_STREAMS + 1), made)
    assert len({len(tokens_of(events)) for events in plain.values()}) == 1
    drafted, _ = run(engine, made)
    assert comparable(drafted) == comparable(plain)
    assert engine.stats().accepted_drafts_total == 0
    run(engine, made[:MAX_STREAMS])
    assert engine.stats().accepted_drafts_total > 0


@pytest.mark.parametrize("is_expected", [True, False])
def test_predicted_answer_is_drafted_from_its_first_token(is_expected: bool) -> None:
    made = request("r", PASSAGE, seed=3, max_tokens=30)
    events, _ = run(make_engine(None), [made])
    answer = tuple(tokens_of(events["r"]))
    predicted = replace(made, prediction=answer if is_expected else PASSAGE[::-1])
    engine = make_engine()
    drafted, _ = run(engine, [predicted])
    assert comparable(drafted) == comparable(events)
    accepted = engine.stats().accepted_drafts_total
    assert accepted >= 20 if is_expected else accepted < 20


def test_drafts_that_are_wrong_end_by_themselves() -> None:
    """The costs are those of a large model, the text repeats nothing that it could be told by."""
    costs = DraftCosts((1.0, 1.03, 1.09, 1.2, 1.5), 0.03)
    usage = usage_of(make_engine(costs), request("r", PASSAGE * 3, seed=1, max_tokens=300))
    assert usage.rejected_tokens < 15


def test_text_of_a_session_is_remembered_over_requests() -> None:
    engine = make_engine()
    run(engine, [request("a", PASSAGE, keep=True, max_tokens=9)])
    (session,) = engine._sessions
    engine.submit(request("b", PASSAGE[:10], session.id, keep=True, max_tokens=9), 0.0)
    (live,) = engine._requests
    engine.step(0.0)
    assert list(live.drafts) == list(PASSAGE[10:25])
    assert live.num_drafts == 5, "as far as a row has room for"


def test_text_is_the_same_after_restore_with_a_new_index() -> None:
    made = repeating(keep=True, seed=4)
    plain, _ = run(make_engine(None), [made])
    engine = make_engine()
    engine.submit(made, 0.0)
    got = [token for _ in range(5) for token in tokens_of(engine.step(0.0))]
    (session,) = engine._sessions
    value = engine.kept.value(session.id, "me")
    other = make_engine()
    other.kept.restore(Past(value), 0.0)
    other.unpark("r")
    assert got + tokens_of(drain(other)["r"]) == tokens_of(plain["r"])
    assert other.stats().accepted_drafts_total > 0


def test_indexes_are_bounded_and_go_with_their_sessions() -> None:
    engine = make_engine(max_asleep=MAX_INDEXES + 9)
    drafter = engine._drafter
    assert isinstance(drafter, SuffixDrafter)
    for i in range(MAX_INDEXES + 5):
        run(engine, [request(f"r{i}", (5, 6, 7), keep=True, max_tokens=3)])
    assert drafter.num_indexes == MAX_INDEXES
    for session in list(engine._sessions):
        engine.kept.delete(session.id, "me")
    drain(engine)
    del session
    gc.collect()
    assert drafter.num_indexes == 0


# Grammars

FORM = {
    "type": "object",
    "properties": {
        "the little girl": {"type": "integer", "minimum": 1, "maximum": 9},
        "every morning": {"type": "array", "items": {"type": "boolean"}, "minItems": 9},
    },
    "required": ["the little girl", "every morning"],
    "additionalProperties": False,
}


@cache
def matchers() -> Callable[[str], Matcher]:
    return FormatCompiler(tiny_tokenizer()).matcher


@cache
def json_grammar() -> str:
    tokens = [tiny_tokenizer().token_bytes(id) for id in range(VOCAB_SIZE)]
    vocabulary = Vocabulary(tokens, EOS, tiny_tokenizer().encode_exact)
    text = grammar_text({"type": "json_schema", "json_schema": {"schema": FORM}})
    return with_costs(text, vocabulary)


def in_json(name: str = "r", **sampling: Any) -> Request:
    return request(name, PASSAGE, **{"grammar": json_grammar(), "max_tokens": 200, **sampling})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_under_a_grammar_is_that_without_drafts_and_takes_fewer_steps(
    temperature: float,
) -> None:
    made = [in_json(f"r{seed}", seed=seed, temperature=temperature) for seed in range(4)]
    plain, _ = run(make_engine(None, matchers=matchers()), made)
    drafted, _ = run(make_engine(matchers=matchers()), made)
    assert comparable(drafted) == comparable(plain)
    alone = make_engine(matchers=matchers())
    num_tokens = len(tokens_of(plain["r0"]))
    assert num_steps(alone, made[0]) < num_tokens
    assert alone.stats().accepted_drafts_total > 0


def test_only_token_that_a_grammar_leaves_is_drafted_at_any_rate() -> None:
    drafter, stream = SuffixDrafter(CHEAP, tiny_tokenizer().token_bytes), Stream()
    engine = make_engine()
    engine.submit(request(), 0.0)
    (live,) = engine._requests
    drafter._streams[live.session] = stream
    stream.rates = [0.0] * len(stream.rates)
    assert drafter.next_draft(live, [], mask_of(77)) == 77
    assert drafter.next_draft(live, [77], mask_of(5)) == 5
    assert [(guess.token, guess.kind) for guess in stream.guess] == [(77, CERTAIN), (5, CERTAIN)]
    texts = {tiny_tokenizer().token_bytes(id): id for id in range(VOCAB_SIZE)}
    longest = max(texts, key=len)
    mask = mask_of(texts[longest[:1]], texts[longest])
    assert drafter.next_draft(live, [], mask) is None, "it never was right"
    stream.rates = [1.0] * len(stream.rates)
    assert drafter.next_draft(live, [], mask) == texts[longest]
    stream.read([texts[longest[:1]]])
    assert drafter.next_draft(live, [], mask) == texts[longest[:1]], "as the last time"


def test_token_that_came_at_a_place_before_is_drafted_there_while_it_is_mostly_right() -> None:
    drafter, stream = SuffixDrafter(CHEAP, tiny_tokenizer().token_bytes), Stream()
    engine = make_engine()
    engine.submit(request(), 0.0)
    (live,) = engine._requests
    drafter._streams[live.session] = stream
    number, text = mask_of(*range(0, 250, 5)), mask_of(*range(0, 250, 3))
    assert drafter.next_draft(live, [], number) is None
    stream.read([10])
    assert drafter.next_draft(live, [], number) == 10, "the same place"
    assert drafter.next_draft(live, [10], text) is None, (
        "no token of another place, 30 has not come"
    )
    stream.read([10, 30])
    assert drafter.next_draft(live, [10], mask_of(*range(30, 60))) == 30, "it came after 10"
    for token in (15, 15, 15, 15):
        drafter.next_draft(live, [], number)
        stream.read([token])
    stream.rates = [0.0] * len(stream.rates)
    assert drafter.next_draft(live, [], number) == 15, "what is mostly right at the place"
    for token in range(20, 90, 5):
        stream.choices.learn(place_of(number), 10, token)
    assert drafter.next_draft(live, [], number) is None, "each time it was another one"


def mask_of(*ids: int) -> npt.NDArray[np.uint32]:
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    for id in ids:
        mask[id // 32] |= np.uint32(1 << id % 32)
    return mask


def test_ids_of_a_mask_are_listed_where_they_are_few() -> None:
    assert few_ids(mask_of()) == ()
    assert few_ids(mask_of(0, 31, 32, 255)) == (0, 31, 32, 255)
    assert len(few_ids(mask_of(*range(MAX_FORCED_IDS)))) == MAX_FORCED_IDS
    assert few_ids(mask_of(*range(MAX_FORCED_IDS + 1))) == ()
    assert few_ids(mask_of(*range(0, VOCAB_SIZE, 7))) == ()


@pytest.mark.parametrize(
    ("texts", "longest"),
    [
        ([b"n", b"na", b"name"], 2),
        ([b"name", b"n"], 0),
        ([b"t", b"f", b"tr"], None),
        ([b"", b"n"], None),
        ([], None),
    ],
)
def test_text_is_forced_where_all_tokens_begin_the_longest(
    texts: list[bytes], longest: int | None
) -> None:
    assert longest_of(range(len(texts)), texts.__getitem__) == longest
