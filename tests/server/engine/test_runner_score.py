"""Both runners: what is read of a text, its log-probabilities or its last hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from model.architectures.network import model_of
from model.attention import MECHANISMS, spec_of
from server.engine.runner import HIDDEN_UNIT, Feed, Runner
from server.engine.types import SamplingParams
from tests.server.engine.runners import BACKENDS, TOLERANCE, drawn, make_pool, make_runner
from tests.tiny import tiny_checkpoint

#: A choice; that of dijiang has no parallel form in float64.
NAMES = ["delta", "elu", "gated", "performer", "retnet", "vq"]
SERVED = [name for name in MECHANISMS if spec_of(name).constant_state]
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


def parts_of(runner: Runner, slot: int) -> list[npt.NDArray[np.float64]]:
    """The sums of the last hidden states of each part of the text."""
    found, start = [], 0
    for size in CUT:
        found.append(runner.embed(Feed(slot, start, TEXT[start : start + size])))
        start += size
    return found


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
def test_sum_of_hidden_states_equals_that_of_the_parallel_form(backend: str, name: str) -> None:
    checkpoint = tiny_checkpoint(name)
    model = model_of(checkpoint.config, checkpoint.weights, torch.float64)
    hidden = model.hidden_parallel(torch.tensor([TEXT[:-1]]))[0]
    found = sum(parts_of(make_runner(backend, make_pool(name), name), 2))
    bound = len(hidden) * TOLERANCE * float(hidden.abs().max())
    assert np.abs(found - hidden.sum(dim=0).numpy()).max() <= bound


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_reading_leaves_the_bits_that_running_leaves(backend: str, name: str) -> None:
    """Scored, embedded, or in turn with runs, in any slot; and the next token is the same."""
    pool = make_pool(name, 6)
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
        first = runner.embed(Feed(4, start, tokens))
        assert runner.embed(Feed(5, start, tokens)).tobytes() == first.tobytes()
        start += size
        assert all((pool.blocks[slot] == pool.blocks[0]).all() for slot in range(6))
    token, *others = drawn(runner, [Feed(slot, start, TEXT[-1:], draw) for slot in range(6)])
    assert others == [token] * 5


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_probabilities_of_what_may_follow_add_up_to_one(backend: str, size: int) -> None:
    pool = make_pool()
    runner = make_runner(backend, pool, num_ids=291)
    total, before = 0.0, set()
    for following in range(291):
        pool.blocks[0].fill(0)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_add_up_to_the_same_in_any_order(backend: str) -> None:
    parts = parts_of(make_runner(backend, make_pool()), 0)
    assert all((part / HIDDEN_UNIT == np.round(part / HIDDEN_UNIT)).all() for part in parts)
    forth, back = (reduce(np.add, each).tobytes() for each in (parts, parts[::-1]))
    assert forth == back
    assert {part.shape for part in parts} == {(tiny_checkpoint().config.hidden_size,)}


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_state_that_is_not_finite_gives_nan_alone(backend: str, size: int) -> None:
    pool = make_pool(num_slots=6)
    runner, text, following = make_runner(backend, pool), TEXT[:size], TEXT[size]
    wanted = runner.score(Feed(0, 0, text), following), runner.embed(Feed(1, 0, text)).tobytes()
    for slot in (2, 3):
        pool.blocks[slot].view(np.float32).fill(math.nan)
    found = logprobs(runner, Feed(2, 0, text), following)
    assert len(found) == size
    assert all(math.isnan(each) for each in found)
    assert np.isnan(runner.embed(Feed(3, 0, text))).all()
    again = runner.score(Feed(4, 0, text), following), runner.embed(Feed(5, 0, text)).tobytes()
    assert again == wanted


@pytest.mark.parametrize("tokens", [(300,), (-1,), (*range(15), 300)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_id_that_cannot_be_read_changes_nothing(backend: str, tokens: tuple[int, ...]) -> None:
    pool = make_pool()
    runner = make_runner(backend, pool)
    with pytest.raises((ValueError, IndexError)):
        runner.embed(Feed(0, 0, tokens))
    assert not pool.blocks.any()
