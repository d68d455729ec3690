"""Both runners: the log-probabilities of a text's tokens, and the state that scoring leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model.architectures.network import model_of
from server.engine.runner import Feed, Runner
from server.engine.types import SamplingParams
from tests.server.engine.runners import BACKENDS, TOLERANCE, make_pool, make_runner
from tests.tiny import tiny_checkpoint

NAMES = ["delta", "elu", "gated", "performer", "retnet", "vq"]
#: Sizes on the grid of torch; each is one call.
CUT = (64, 16, 16, 1, 1)
TEXT = tuple((7 * i * i + 3 * i) % 290 for i in range(sum(CUT) + 1))


def score(
    runner: Runner, slot: int, text: Sequence[int] = TEXT, cut: Sequence[int] = CUT
) -> list[float]:
    """Of all tokens of ``text`` but the first, from the slot's empty state."""
    found, start = [], 0
    for size in cut:
        feed = Feed(slot, start, text[start : start + size])
        found += logprobs(runner, feed, text[start + size])
        start += size
    return found


def logprobs(runner: Runner, feed: Feed, following: int) -> list[float]:
    return [each.logprob for each in runner.score(feed, following)]


def logits_of(name: str) -> Tensor:
    """Of the whole text at once, in float64."""
    checkpoint = tiny_checkpoint(name)
    model = model_of(checkpoint.config, checkpoint.weights, torch.float64)
    return model.parallel(torch.tensor([TEXT[:-1]]))[0]


def picked(logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1)[torch.arange(len(TEXT) - 1), list(TEXT[1:])]


def largest_error(found: Sequence[float], wanted: Sequence[float]) -> float:
    assert len(found) == len(wanted)
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_equal_those_of_the_parallel_form(backend: str, name: str) -> None:
    """A log-softmax moves by at most twice what its logits move by."""
    logits = logits_of(name)
    found = score(make_runner(backend, make_pool(name), name), 2)
    bound = 2 * TOLERANCE * float(logits.abs().max())
    assert largest_error(found, picked(logits).tolist()) <= bound


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scoring_leaves_the_bits_that_running_leaves(backend: str, name: str) -> None:
    """Also where some chunks are scored and others are run, and the next token is the same."""
    pool = make_pool(name)
    runner = make_runner(backend, pool, name)
    draw = runner.prepare(SamplingParams(seed=3))
    start = 0
    for i, size in enumerate(CUT):
        tokens = TEXT[start : start + size]
        runner.run([Feed(slot, start, tokens) for slot in (0, 3)])
        runner.score(Feed(1, start, tokens), 5)
        if i % 2:
            runner.score(Feed(2, start, tokens), TEXT[start + size])
        else:
            runner.run([Feed(2, start, tokens)])
        start += size
        assert all((pool.block(slot) == pool.block(0)).all() for slot in (1, 2))
    first, *others = runner.run([Feed(slot, start, TEXT[-1:], draw) for slot in range(4)])
    assert others == [first] * 3


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_probabilities_of_what_may_follow_add_up_to_one(backend: str, size: int) -> None:
    pool = make_pool()
    runner = make_runner(backend, pool, num_ids=291)
    total, before = 0.0, set()
    for following in range(291):
        pool.block(0).fill(0)
        *others, last = logprobs(runner, Feed(0, 0, TEXT[:size]), following)
        total += math.exp(last)
        before.add(tuple(others))
    assert abs(total - 1) < 1e-5
    assert len(before) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_of_padding_have_no_part(backend: str) -> None:
    logits = logits_of("gated")
    found = score(make_runner(backend, make_pool(), num_ids=290), 0)
    bound = 2 * TOLERANCE * float(logits.abs().max())
    assert largest_error(found, picked(logits[:, :290]).tolist()) <= bound
    assert largest_error(found, picked(logits).tolist()) > 10 * bound


@pytest.mark.parametrize("following", [-1, 291, 299, 300, 2**40])
@pytest.mark.parametrize("place", [1, 8, 15, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scored_id_that_does_not_exist_changes_nothing(
    backend: str, place: int, following: int
) -> None:
    pool = make_pool()
    runner = make_runner(backend, pool, num_ids=291)
    text = [*TEXT[:place], following, *TEXT[place + 1 : 17]]
    with pytest.raises(ValueError, match="token id"):
        runner.score(Feed(0, 0, text[:16]), text[16])
    assert not pool.blocks.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_id_of_padding_may_be_fed_first(backend: str) -> None:
    """As `run` may: it was there before, and its own score is not asked for."""
    pool = make_pool()
    (found,) = make_runner(backend, pool, num_ids=291).score(Feed(0, 0, (295,)), 5)
    assert found.logprob < 0


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_state_that_is_not_finite_gives_nan_alone(backend: str, size: int) -> None:
    pool = make_pool()
    runner = make_runner(backend, pool)
    (*_, wanted) = runner.score(Feed(0, 0, TEXT[:size]), TEXT[size])
    pool.block(1).view(np.float32).fill(float("nan"))
    found = logprobs(runner, Feed(1, 0, TEXT[:size]), TEXT[size])
    assert len(found) == size
    assert all(math.isnan(each) for each in found)
    (*_, again) = runner.score(Feed(2, 0, TEXT[:size]), TEXT[size])
    assert again == wanted


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_logit_that_is_not_finite_is_not_hidden(backend: str, value: float, size: int) -> None:
    """Also where it is minus infinity, which the others' softmax would not show."""
    embedding = tiny_checkpoint().weights["embedding.weight"].copy()
    embedding[295, 0] = value
    weights = {**tiny_checkpoint().weights, "embedding.weight": embedding}
    spoilt = replace(tiny_checkpoint(), weights=weights)
    for num_ids, hides in ((300, False), (295, True)):
        runner = make_runner(backend, make_pool(), num_ids=num_ids, checkpoint=spoilt)
        found = logprobs(runner, Feed(0, 0, TEXT[:size]), TEXT[size])
        assert [math.isnan(each) for each in found] == [not hides] * size
