"""Both runners: the most likely tokens of a place, of a draw and of a score, are the same list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.architectures.network import model_of
from server.engine.runner import NOT_FINITE, CpuStatePool, Feed, Runner
from server.engine.types import Dry, SamplingParams
from tests.draws import mask_of
from tests.server.engine.runners import BACKENDS, TOLERANCE, drawn, make_pool, make_runner
from tests.tiny import tiny_checkpoint

NAMES = ["delta", "elu", "gated", "performer", "retnet", "vq"]
#: Of the 300 ids of the tiny models, those that stand for something.
NUM_IDS = 290
TEXT = tuple((7 * i * i + 3 * i) % NUM_IDS for i in range(65))
GREEDY = SamplingParams(temperature=0.0, top_logprobs=5)


@cache
def made(backend: str, name: str) -> tuple[Runner, CpuStatePool]:
    """Since torch's takes a while to make."""
    pool = make_pool(name, 9)
    return make_runner(backend, pool, name, NUM_IDS), pool


def shared(backend: str, name: str = "gated") -> tuple[Runner, CpuStatePool]:
    """Of `NUM_IDS`, with nine empty states."""
    runner, pool = made(backend, name)
    pool.blocks.fill(0)
    return runner, pool


def likely(
    runner: Runner, feeds: Sequence[Feed]
) -> list[tuple[int | None, float, list[tuple[int, float]]]]:
    """The token of each row, its log-probability and the most likely ones; those of none."""
    return [
        (tokens[0], logprobs[0], list(tops[0]))
        if logprobs
        else (tokens[0] if tokens else None, math.nan, [])
        for tokens, logprobs, tops in runner.run(feeds)
    ]


@cache
def logprobs_of(name: str) -> tuple[Tensor, float]:
    """Of each place of `TEXT` [64, NUM_IDS], in float64, and how far float32 may be from them."""
    checkpoint = tiny_checkpoint(name)
    model = model_of(checkpoint.config, checkpoint.weights, torch.float64)
    logits = model.parallel(torch.tensor([TEXT[:-1]]))[0, :, :NUM_IDS]
    return logits.log_softmax(dim=-1), 2 * TOLERANCE * float(logits.abs().max())


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tops_of_a_score_are_the_largest(backend: str, name: str, size: int) -> None:
    """In order, each with its own number, whatever followed."""
    wanted, bound = logprobs_of(name)
    runner, _ = shared(backend, name)
    found = runner.score(Feed(0, 0, TEXT[:size]), TEXT[size], 20)
    assert len(found) == size
    for row, (logprob, top), token in zip(wanted, found, TEXT[1:], strict=False):
        ids, values = [id for id, _ in top], [value for _, value in top]
        assert len(set(ids)) == 20
        assert values == sorted(values, reverse=True)
        assert np.abs(row[ids].numpy() - values).max() <= bound
        assert abs(row.sort(descending=True).values[:20].numpy() - values).max() <= bound
        assert dict(top).get(token, logprob) == logprob


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_are_the_first_of_more(backend: str, size: int, num_top: int) -> None:
    runner, _ = shared(backend)
    more = runner.score(Feed(0, 0, TEXT[:size]), TEXT[size], 20)
    fewer = runner.score(Feed(1, 0, TEXT[:size]), TEXT[size], num_top)
    assert fewer == [(logprob, top[:num_top]) for logprob, top in more]


@pytest.mark.parametrize("params", [{"temperature": 5e-324}, {"top_p": 0.0}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_least_temperature_and_top_p_draw_the_most_likely(
    backend: str, params: dict[str, float]
) -> None:
    runner, _ = shared(backend)
    for slot in range(4):
        draw = runner.prepare(SamplingParams(seed=slot, top_logprobs=1, **params))
        ((token, _, top),) = likely(runner, [Feed(slot, 0, TEXT[:64], draw, wants_logprobs=True)])
        assert token == top[0][0]


@pytest.mark.parametrize(
    ("name", "masked", "params"),
    [
        *((name, False, {}) for name in NAMES),
        ("gated", True, {}),
        ("gated", False, {"temperature": 2.0, "seed": 7}),
        ("gated", True, {"temperature": 100.0}),
        ("gated", False, {"temperature": 1.0, "top_k": 2, "typical_p": 0.5}),
        ("gated", True, {"temperature": 1.0, "top_n_sigma": 0.5}),
        ("gated", False, {"temperature": 1.0, "xtc_probability": 1.0, "dry": Dry(3.0, 1.0, 1)}),
        ("gated", True, {"temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.1}),
        ("gated", False, {"repetition_penalty": 100.0, "presence_penalty": 2.0}),
        ("gated", False, {"repetition_penalty": 0.1, "frequency_penalty": -2.0}),
        ("gated", True, {"logit_bias": ((8, 100.0), (9, -100.0))}),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_a_draw_are_those_of_the_score(
    backend: str, name: str, masked: bool, params: dict[str, Any]
) -> None:
    """To the bit, of what the model says: nothing that the draw asks for moves them."""
    runner, _ = shared(backend, name)
    mask = mask_of(range(5, 200, 3), 10) if masked else None
    for slot, size in enumerate((1, 64)):
        draw = runner.prepare(replace(GREEDY, **params))
        masks = None if mask is None else [mask]
        feed = Feed(slot, 0, TEXT[:size], draw, TEXT[:size], masks, wants_logprobs=True)
        ((token, logprob, top),) = likely(runner, [feed])
        (*_, wanted) = runner.score(Feed(2 + slot, 0, TEXT[:size]), token, 5)
        assert (logprob, top) == wanted
        assert len(top) == 5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_most_likely_token_has_the_first_number(backend: str, name: str) -> None:
    runner, _ = shared(backend, name)
    feed = Feed(0, 0, TEXT[:64], runner.prepare(GREEDY), wants_logprobs=True)
    ((token, logprob, top),) = likely(runner, [feed])
    assert top[0] == (token, logprob)


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_that_a_penalty_brought_has_its_own_number(backend: str) -> None:
    """Recent so often that it is drawn whatever the model thinks of it."""
    runner, _ = shared(backend)
    draw = runner.prepare(replace(GREEDY, frequency_penalty=-2.0))
    feed = Feed(0, 0, TEXT[:1], draw, (8,) * 40, wants_logprobs=True)
    ((token, logprob, _),) = likely(runner, [feed])
    (wanted,) = runner.score(Feed(1, 0, TEXT[:1]), 8)
    assert (token, logprob) == (8, wanted.logprob)
    assert wanted.logprob < -1


@pytest.mark.parametrize("name", ["delta", "gated", "retnet"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_gets_as_many_as_it_asks_for(backend: str, name: str) -> None:
    """In company, and the number of the token where that alone is asked for, or none."""
    runner, pool = shared(backend, name)
    asked: list[dict[str, Any]] = [
        {"top_logprobs": 3},
        {"top_logprobs": None},
        {"top_logprobs": 0},
        {"top_logprobs": 20},
        {"top_logprobs": None, "logprob": True},
        {"top_logprobs": 1, "logprob": True},
    ]
    draws = [runner.prepare(replace(GREEDY, **each)) for each in asked]
    feeds = [
        Feed(i, 0, TEXT[: 16 if i % 2 else 1], draw, wants_logprobs=i != 1)
        for i, draw in enumerate(draws)
    ]
    feeds.insert(2, Feed(7, 0, TEXT[:16]))
    pool.blocks[8].view(np.float32).fill(math.nan)
    feeds.append(Feed(8, 0, TEXT[:1], draws[0], wants_logprobs=True))
    tokens, logprobs, tops = zip(*likely(runner, feeds), strict=True)
    assert [len(top) for top in tops] == [3, 0, 0, 0, 20, 0, 1, 0]
    assert [math.isnan(each) for each in logprobs] == [
        feed.draw is None or i in (1, 7) for i, feed in enumerate(feeds)
    ]
    assert (tokens[2], tokens[7]) == (None, NOT_FINITE)
    pool.blocks.fill(0)
    for i, feed in enumerate(feeds[:7]):
        ((token, logprob, top),) = likely(runner, [feed])
        assert (token, top) == (tokens[i], tops[i])
        assert logprob == logprobs[i] or (math.isnan(logprob) and math.isnan(logprobs[i]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_are_ordered_by_id(backend: str) -> None:
    """Ids with the same embedding, which is the head's as well, have the same logit."""
    embedding = tiny_checkpoint().weights["embedding.weight"].copy()
    likely = shared(backend)[0].score(Feed(0, 0, TEXT[:1]), 5, 1)[0].top[0][0]
    twins = [id for id in (3, 64, 150, 289) if id != TEXT[0]]
    embedding[twins] = embedding[likely]
    weights = {**tiny_checkpoint().weights, "embedding.weight": embedding}
    twinned = replace(tiny_checkpoint(), weights=weights)
    runner = make_runner(backend, make_pool(), checkpoint=twinned)
    best = sorted({likely, *twins})
    for num in (2, 4, 20):
        (found,) = runner.score(Feed(0, 0, TEXT[:1]), 5, num)
        assert [id for id, _ in found.top][: len(best)] == best[:num]
        assert len({value for _, value in found.top[: len(best)]}) == 1
    assert drawn(runner, [Feed(1, 0, TEXT[:1], runner.prepare(GREEDY))]) == best[:1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_more_than_there_are(backend: str) -> None:
    """And no ids of padding."""
    runner = make_runner(backend, make_pool(), num_ids=7)
    draw = runner.prepare(replace(GREEDY, top_logprobs=20))
    feeds = [Feed(slot, 0, (1 + slot,), draw, wants_logprobs=True) for slot in range(2)]
    found = [top for _, _, top in likely(runner, feeds)]
    (scored,) = runner.score(Feed(2, 0, (1,)), 3, 20)
    for top in (*found, scored.top):
        assert sorted(id for id, _ in top) == list(range(7))
        assert abs(sum(math.exp(value) for _, value in top) - 1) < 1e-6


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_state_that_is_not_finite_has_none(backend: str, size: int) -> None:
    runner, pool = shared(backend)
    pool.blocks[1].view(np.float32).fill(math.nan)
    found = runner.score(Feed(1, 0, TEXT[:size]), TEXT[size], 5)
    assert [top for _, top in found] == [[]] * size
    assert all(math.isnan(logprob) for logprob, _ in found)


@pytest.mark.parametrize("asked", [{"top_logprobs": 20}, {"logprob": True}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_asking_changes_neither_token_nor_state(backend: str, asked: dict[str, Any]) -> None:
    runner, pool = shared(backend)
    given = SamplingParams(temperature=1.5, seed=3, presence_penalty=1.0)
    quiet, asking = runner.prepare(given), runner.prepare(replace(given, **asked))
    for i, token in enumerate(TEXT[:20]):
        (first,) = drawn(runner, [Feed(0, i, (token,), quiet, (token,))])
        feed = Feed(1, i, (token,), asking, (token,), wants_logprobs=True)
        (second,) = drawn(runner, [feed])
        assert first == second
    assert pool.blocks[0].tobytes() == pool.blocks[1].tobytes()
