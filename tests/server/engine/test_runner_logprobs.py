"""Both runners: the log-probability of a drawn token is that of `Runner.score`, in any company."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model.architectures.network import model_of
from server.engine.runner import NO_TOKEN, NOT_FINITE, Feed, Runner
from server.engine.types import SamplingParams
from tests.server.engine.runners import BACKENDS, TOLERANCE, make_pool, make_runner
from tests.tiny import tiny_checkpoint

NAMES = ["delta", "elu", "gated", "performer", "retnet", "vq"]
#: Of the 300 ids of the tiny models, those that stand for something.
NUM_IDS = 290
TEXT = tuple((7 * i * i + 3 * i) % NUM_IDS for i in range(64))
WANTED = SamplingParams(temperature=1.5, seed=3, logprob=True)


def run_one(
    runner: Runner, slot: int, size: int, params: SamplingParams, recent: tuple[int, ...] = ()
) -> tuple[int, float]:
    """The token drawn after the first ``size`` of `TEXT`, and its log-probability."""
    feed = Feed(slot, 0, TEXT[:size], runner.prepare(params), recent or None)
    (token,), (logprob,) = runner.run([feed]), runner.logprobs()
    return token, logprob


def score_of(runner: Runner, slot: int, size: int, token: int) -> float:
    return runner.score(Feed(slot, 0, TEXT[:size]), token)[-1].logprob


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logprob_is_the_score_of_the_token(backend: str, name: str) -> None:
    """To the bit, and that of the parallel form in float64.

    A log-softmax moves by at most twice what its logits move by.
    """
    checkpoint = tiny_checkpoint(name)
    model = model_of(checkpoint.config, checkpoint.weights, torch.float64)
    runner = make_runner(backend, make_pool(name, 6), name, NUM_IDS)
    for slot, size in enumerate((1, 16, 64)):
        token, found = run_one(runner, slot, size, WANTED)
        assert found == score_of(runner, 3 + slot, size, token)
        logits = model.parallel(torch.tensor([TEXT[:size]]))[0, -1]
        wanted = float(logits[:NUM_IDS].log_softmax(dim=-1)[token])
        assert abs(found - wanted) <= 2 * TOLERANCE * float(logits.abs().max())


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"temperature": 100.0},
        {"top_k": 1},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"repetition_penalty": 0.1},
        {"repetition_penalty": 1.5, "presence_penalty": 2.0, "frequency_penalty": -2.0},
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_how_the_token_is_drawn_does_not_move_it(backend: str, params: dict[str, Any]) -> None:
    runner = make_runner(backend, make_pool(num_slots=16))
    for seed in range(8):
        given = replace(WANTED, seed=seed, **params)
        token, found = run_one(runner, seed, 1, given, recent=(5, 8, 9))
        assert found == score_of(runner, 8 + seed, 1, token)


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_that_a_penalty_brought_has_its_own_logprob(backend: str) -> None:
    """Recent so often that it is drawn whatever the model thinks of it."""
    runner = make_runner(backend, make_pool())
    given = replace(WANTED, temperature=0.0, frequency_penalty=-2.0)
    token, found = run_one(runner, 0, 1, given, recent=(8,) * 40)
    assert token == 8
    assert found == score_of(runner, 1, 1, 8) < -1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_company_does_not_move_it(backend: str, name: str) -> None:
    """Rows of all sizes, some that do not ask, and one that draws nothing."""
    pool = make_pool(name, num_slots=16)
    runner = make_runner(backend, pool, name, NUM_IDS)
    sizes = [1, 64, 1, 16, 1, 16, 1, 1]
    params = [replace(WANTED, seed=i, logprob=i % 3 != 2) for i in range(len(sizes))]
    alone = [run_one(runner, i, sizes[i], params[i]) for i in range(len(sizes))]
    assert [math.isnan(each) for _, each in alone] == [not each.logprob for each in params]
    pool.blocks.fill(0)
    draws = [runner.prepare(each) for each in params]
    feeds = [Feed(i, 0, TEXT[:size], draws[i]) for i, size in enumerate(sizes)]
    feeds.insert(5, Feed(9, 0, TEXT[:16]))
    alone.insert(5, (NO_TOKEN, math.nan))
    assert runner.run(feeds) == [token for token, _ in alone]
    assert np.array_equal(runner.logprobs(), [each for _, each in alone], equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_that_is_not_finite_has_none(backend: str) -> None:
    pool = make_pool()
    runner = make_runner(backend, pool)
    (token, wanted), draw = run_one(runner, 3, 1, WANTED), runner.prepare(WANTED)
    pool.block(1).view(np.float32).fill(math.nan)
    tokens = runner.run([Feed(slot, 0, TEXT[:1], draw) for slot in range(3)])
    assert tokens == [token, NOT_FINITE, token]
    assert np.array_equal(runner.logprobs(), [wanted, math.nan, wanted], equal_nan=True)


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_asking_changes_neither_token_nor_state(backend: str, size: int) -> None:
    pool = make_pool()
    runner = make_runner(backend, pool)
    given = replace(WANTED, presence_penalty=1.0)
    asked, found = run_one(runner, 0, size, given, recent=TEXT[:size])
    quiet, nothing = run_one(runner, 1, size, replace(given, logprob=False), recent=TEXT[:size])
    assert asked == quiet
    assert pool.block(0).tobytes() == pool.block(1).tobytes()
    assert found < 0
    assert math.isnan(nothing)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logprobs_are_those_of_the_last_run(backend: str) -> None:
    """Also after a score, which draws nothing."""
    runner = make_runner(backend, make_pool())
    draw = runner.prepare(WANTED)
    runner.run([Feed(slot, 0, TEXT[:1], draw) for slot in range(3)])
    first = runner.logprobs()
    runner.score(Feed(3, 0, TEXT[:1]), 5)
    assert runner.logprobs() == first
    assert len(first) == 3
    runner.run([Feed(0, 1, TEXT[1:2]), Feed(1, 1, TEXT[1:2])])
    assert [math.isnan(each) for each in runner.logprobs()] == [True, True]
