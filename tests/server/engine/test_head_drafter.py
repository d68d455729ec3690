"""Drafts of a multi-token head: what it reads is right, and no bit of a text hangs on it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model.foreign import MultiTokenHead
from server.engine.drafts import MAX_STREAMS, DraftCosts
from server.engine.engine import Engine
from server.engine.model_drafter import RETRY_TOKENS, HeadDrafter, Reading, WatchedRunner
from server.engine.request import Live
from server.engine.runner import CpuStatePool, Feed, Runner
from server.engine.session import Past
from server.engine.types import Dry
from tests.multi_token_heads import from_start, in_torch
from tests.requirements import needs_native
from tests.server.engine.drafters import CHEAP, NEVER, head_drafter
from tests.server.engine.grammars import EOS, VOCAB_SIZE, FakeMatchers
from tests.server.engine.test_drafts import comparable, requests, run
from tests.server.engine.test_model_drafter import counts
from tests.tiny import (
    drain,
    request,
    started,
    tiny_checkpoint,
    tiny_engine,
    tiny_head,
    tiny_runtime,
    tokens_of,
)

pytestmark = needs_native

PROMPT = (10, 20, 30)
#: Two ids alone are drawn, so that a head that knows nothing is right about half of the time.
BIAS = {"logit_bias": ((33, 90.0), (34, 90.0))}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 5},
    {"seed": 6, "temperature": 1.7, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"seed": 9, "xtc_probability": 0.5, "dry": Dry(2.0, allowed_length=1)},
    {"seed": 7, **BIAS},
]


def make_engine(drafter: HeadDrafter | None, attention: str = "qwen35", **options: Any) -> Engine:
    matchers = FakeMatchers(VOCAB_SIZE, EOS)
    options = {"max_waiting": 90, "matchers": matchers, **options}
    if drafter is not None:
        options = {"drafter": drafter, "wrap": drafter.watch, **options}
    return tiny_engine(attention, runtime=tiny_runtime(attention), **options)


@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize("past", [CHEAP, NEVER])
def test_events_of_any_request_are_those_without_drafts(first: int, past: DraftCosts) -> None:
    made = requests()[first : first + 6]
    plain, _ = run(make_engine(None), made)
    engine = make_engine(head_drafter(past=past))
    drafted, _ = run(engine, made)
    assert comparable(drafted) == comparable(plain)
    assert sum(counts(engine.stats())) > 0


@pytest.mark.parametrize("attention", ["qwen35", "qwen35-slide"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_text_is_that_without_drafts(attention: str, sampling: dict[str, Any]) -> None:
    """Also beyond the bound of the head's own past."""
    made = [request("r", range(5, 200), max_tokens=90, **sampling)]
    if attention == "qwen35":
        made += [request("long", range(5, 250), max_tokens=200, **sampling)]
    plain, _ = run(make_engine(None, attention), made)
    engine = make_engine(head_drafter(attention), attention)
    drafted, _ = run(engine, made)
    assert comparable(drafted) == comparable(plain)
    assert sum(counts(engine.stats())) > 0


@pytest.mark.parametrize("seed", [3, 4])
def test_drafts_are_those_of_the_definition(seed: int) -> None:
    """Of a whole text in torch: hidden states, the head over all of it, and its own after that."""
    drafter = Spy(tiny_head(seed=seed))
    engine = make_engine(drafter)
    events, _ = run(engine, [request("r", PROMPT, temperature=0.0, max_tokens=40)])
    text = [*started(events["r"]).start, *PROMPT, *tokens_of(events["r"])]
    for length, drafts in drafter.drafted.items():
        assert drafts == definition(text[:length], len(drafts), tiny_head(seed=seed)), length
    assert max(map(len, drafter.drafted.values())) > 3
    assert len(drafter.drafted) > 20


class Spy(HeadDrafter):
    """Keeps what it drafted at each length of the text."""

    def __init__(self, head: MultiTokenHead) -> None:
        made = head_drafter(head=head)
        pool = CpuStatePool(made._head.layout, MAX_STREAMS)
        super().__init__(made._past, made._head, pool, CHEAP)
        self.drafted: dict[int, list[int]] = {}

    def _drafts(self, reading: Reading, live: Live, number: int) -> list[int]:
        found = super()._drafts(reading, live, number)
        self.drafted[live.session.length] = found
        return found


def definition(text: list[int], number: int, head: MultiTokenHead) -> list[int]:
    model: Any = tiny_checkpoint("qwen35").model
    mtp, drafts = in_torch(head), list[int]()
    hidden = model.hidden_parallel(torch.tensor([text]))[:, :-1]
    for _ in range(number):
        embedded = model.embedding(torch.tensor([[*text[1:], *drafts]]))
        found = from_start(mtp, embedded, hidden)[:, -1:]
        drafts.append(int(model.logits(found[0, -1]).argmax()))
        hidden = torch.cat([hidden, found], dim=1)
    return drafts


def test_fork_rewind_and_restore_in_the_middle() -> None:
    first = request("r", PROMPT, seed=3, keep=True, max_tokens=50, **BIAS)
    events, _ = run(make_engine(None), [first])
    whole = [*started(events["r"]).start, *PROMPT, *tokens_of(events["r"])]
    for num_steps in (1, 2, 3):
        engine = make_engine(head_drafter())
        engine.submit(first, 0.0)
        for _ in range(num_steps):
            engine.step(0.0)
        (found,) = engine._sessions
        length = found.length
        (fork,) = engine.kept.fork(found.id, "me", 1, 0.0)
        value = engine.kept.value(found.id, "me")
        drain(engine)
        engine.kept.rewind(found.id, "me", Past(replace(value, progress=None)), 0.0)
        other = make_engine(head_drafter())
        other.kept.restore(Past(value), 0.0)
        other.unpark("r")
        assert [*whole[:length], *tokens_of(drain(other)["r"])] == whole
        for session in (fork.session, found.id):
            rest = len(whole) - length
            again = request("go on", (), session, seed=3, max_tokens=rest, **BIAS)
            engine.submit(again, 0.0)
            assert [*whole[:length], *tokens_of(drain(engine)["go on"])] == whole
        assert min(counts(other.stats())[0], counts(engine.stats())[0]) > 0


def test_request_without_speculation_gets_no_drafts() -> None:
    engine = make_engine(head_drafter())
    run(engine, [replace(request("r", PROMPT, max_tokens=30), speculation=False)])
    assert counts(engine.stats()) == (0, 0)


def test_more_sessions_than_states_take_turns() -> None:
    made = [request(f"r{i}", (20 + i,), seed=i, max_tokens=20, **BIAS) for i in range(5)]
    plain, _ = run(make_engine(None), made)
    engine = make_engine(head_drafter(num_slots=2))
    drafted, _ = run(engine, made)
    assert comparable(drafted) == comparable(plain)
    assert counts(engine.stats())[0] > 0


def test_events_of_many_streams() -> None:
    """With more than have states nothing is drafted, and once fewer run it is."""
    for number in (MAX_STREAMS, MAX_STREAMS + 1):
        made = [
            request(f"r{i}", (20 + i,), seed=i, max_tokens=20 + 9 * (i > 5), **BIAS)
            for i in range(number)
        ]
        plain, _ = run(make_engine(None), made)
        engine = make_engine(head_drafter())
        drafted, _ = run(engine, made)
        assert comparable(drafted) == comparable(plain)
        assert counts(engine.stats())[0] > 0


def test_head_that_is_mostly_wrong_stops_and_is_tried_again() -> None:
    costs = DraftCosts((1.0, 1.03, 1.09, 1.2, 1.5), 0.03, draft_s=0.3)
    bound = "qwen35-slide"
    engine = make_engine(head_drafter(bound, costs), bound)
    run(engine, [request("r", PROMPT, seed=1, max_tokens=RETRY_TOKENS - 20)])
    first = sum(counts(engine.stats()))
    assert 0 < first < 20
    run(engine, [request("r", PROMPT, seed=1, max_tokens=RETRY_TOKENS + 100)])
    again = sum(counts(engine.stats())) - first
    assert first < again < 2 * 20


def test_many_short_texts_lose_two_percent_to_a_head_that_is_never_right() -> None:
    """Each text expects as much of it as the first one, and what all of them lose is bounded."""
    costs = DraftCosts((1.0, 1.03, 1.09, 1.2, 1.5), 0.03, draft_s=0.1)
    engine = make_engine(head_drafter(costs=costs))
    for number in range(20):
        run(engine, [request(f"r{number}", PROMPT, seed=number, max_tokens=50)])
    accepted, rejected = counts(engine.stats())
    assert accepted <= 0.1 * rejected
    assert 0 < (accepted + rejected) * costs.lost_s(1, 0) < 0.02 * 20 * 50


def test_head_that_takes_longer_than_tokens_drafts_nothing() -> None:
    costs = DraftCosts((1.0, 1.03, 1.09, 1.2, 1.5), draft_s=1.0)
    engine = make_engine(head_drafter(costs=costs))
    run(engine, [request("r", PROMPT, max_tokens=30)])
    assert counts(engine.stats()) == (0, 0)


def test_output_that_is_not_finite_drafts_nothing() -> None:
    head = tiny_head()
    broken = {**head.weights, "join.weight": np.full_like(head.weights["join.weight"], np.nan)}
    made = [request("r", PROMPT, seed=4, max_tokens=30)]
    plain, _ = run(make_engine(None), made)
    engine = make_engine(head_drafter(head=head._replace(weights=broken)))
    drafted, _ = run(engine, made)
    assert comparable(drafted) == comparable(plain)
    assert counts(engine.stats()) == (0, 0)


def test_head_that_fails_drafts_no_more(caplog: pytest.LogCaptureFixture) -> None:
    drafter = head_drafter()
    made = [request("r", PROMPT, seed=4, max_tokens=40)]
    plain, _ = run(make_engine(None), made)
    engine = make_engine(drafter)
    engine.submit(made[0], 0.0)
    events: list[Any] = [*engine.step(0.0), *engine.step(0.0)]
    drafter._pool.zero(0)
    drafter._blocks = drafter._blocks[:, :64].copy()
    with caplog.at_level(logging.ERROR, "everstream.engine"):
        events += drain(engine)["r"]
    assert tokens_of(events) == tokens_of(plain["r"])
    assert caplog.messages == ["the draft model or head failed; it drafts no more"]


def test_step_counts_where_what_the_head_reads_cannot_be_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The states have changed by then: the same tokens must not be fed again."""

    class Forgetful(WatchedRunner):
        num_failed = 0

        def _keep(self, feed: Feed, end: int) -> None:
            if feed.position % 7 == 3:
                Forgetful.num_failed += 1
                raise MemoryError
            super()._keep(feed, end)

    def wrapped(runner: Runner) -> Runner:
        watched = drafter.watch(runner)
        assert isinstance(watched, WatchedRunner)
        watched.__class__ = Forgetful
        return watched

    made = [request(f"r{seed}", PROMPT, max_tokens=60, seed=seed, **BIAS) for seed in range(2)]
    plain, _ = run(make_engine(None), made)
    drafter = head_drafter(past=CHEAP)
    with caplog.at_level(logging.CRITICAL, "everstream.engine"):
        found, _ = run(make_engine(drafter, wrap=wrapped), made)
    assert comparable(found) == comparable(plain)
    assert Forgetful.num_failed > 0
