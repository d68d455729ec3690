"""Both runners: bias, mask and typical sampling reach the draw, and no other row's."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from server.engine.runner import NOT_FINITE, CpuStatePool, Feed, Runner
from server.engine.types import SamplingParams
from tests.draws import allowed, mask_of, random_mask, random_params, random_recent
from tests.requirements import needs_native
from tests.server.engine.runners import BACKENDS, drawn, make_pool, make_runner
from tests.tiny import tiny_checkpoint

#: Of the 300 ids of the tiny models, those that stand for something; ten words have bits for 320.
NUM_IDS, NUM_WORDS = 290, 10
GREEDY = SamplingParams(temperature=0.0)


@cache
def made(backend: str) -> tuple[Runner, CpuStatePool]:
    """Since torch's takes a while to make."""
    pool = make_pool(num_slots=8)
    return make_runner(backend, pool, num_ids=NUM_IDS), pool


def shared(backend: str) -> tuple[Runner, CpuStatePool]:
    runner, pool = made(backend)
    pool.blocks.fill(0)
    return runner, pool


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_equal_their_definition(backend: str) -> None:
    """Of the parallel form's logits; nearly all, since those are rounded in another way."""
    chance, found, sure = np.random.default_rng(5), 0, 0
    runner, pool = shared(backend)
    model = tiny_checkpoint().model
    for token in range(150):
        params, mask = random_params(chance, NUM_IDS), random_mask(chance, NUM_IDS)
        recent = random_recent(chance, NUM_IDS)
        draw = runner.prepare(SamplingParams(**vars(params)))
        pool.blocks[0].fill(0)
        (one,) = drawn(runner, [Feed(0, 0, (token,), draw, recent, [mask])])
        logits = model.parallel(torch.tensor([[token]]))[0, -1, :NUM_IDS].numpy()
        wanted = allowed(logits, params, 1, recent, mask)
        found += one in wanted
        sure += len(wanted) == 1
    assert found >= 148
    assert sure >= 120


@needs_native
def test_native_draws_what_torch_draws() -> None:
    chance, same = np.random.default_rng(6), 0
    for token in range(200):
        params, mask = random_params(chance, NUM_IDS), random_mask(chance, NUM_IDS)
        found = set()
        for backend in ("native", "torch"):
            runner, _ = shared(backend)
            draw = runner.prepare(SamplingParams(**vars(params)))
            found.update(drawn(runner, [Feed(0, 0, (token,), draw, (8, 7, 8), [mask])]))
        same += len(found) == 1
    assert same >= 197


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_of_one_row_is_not_another_s(backend: str, size: int, temperature: float) -> None:
    runner, _ = shared(backend)
    draw, text = runner.prepare(SamplingParams(temperature=temperature)), tuple(range(size))
    free = Feed(0, 0, text, draw)
    (wanted,) = drawn(runner, [free])
    shared(backend)
    masked = [Feed(1 + i, 0, text, draw, None, [mask_of([9 * i], NUM_WORDS)]) for i in range(5)]
    found = drawn(runner, [free, *masked, free._replace(slot=7)])
    assert found == [wanted, 0, 9, 18, 27, 36, wanted]


@pytest.mark.parametrize(
    "mask",
    [
        np.zeros(NUM_WORDS, np.uint32),
        mask_of(range(NUM_IDS, 320), NUM_WORDS),
        np.full(9, 0xFFFFFFFF, np.uint32),
        np.full(NUM_WORDS, 7, np.int64),
        np.full((1, NUM_WORDS), 7, np.uint32),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_mask_changes_no_state(backend: str, place: int, mask: Any) -> None:
    """One that allows nothing, or padding alone, or has too few words or others."""
    runner, pool = shared(backend)
    draw, sound = runner.prepare(GREEDY), mask_of([NUM_IDS - 1], NUM_WORDS)
    feeds = [Feed(slot, 0, (5,), draw, None, [sound]) for slot in range(3)]
    feeds[place] = feeds[place]._replace(allowed=[mask])
    with pytest.raises(ValueError, match="mask"):
        runner.run(feeds)
    assert not pool.blocks.any()
    feeds[place] = feeds[place]._replace(allowed=[sound])
    assert drawn(runner, feeds) == [NUM_IDS - 1] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_without_a_draw_is_not_read(backend: str) -> None:
    runner, _ = shared(backend)
    assert drawn(runner, [Feed(0, 0, (5,), None, None, [np.zeros(NUM_WORDS, np.uint32)])]) == [-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_does_not_hide_what_is_not_finite(backend: str) -> None:
    runner, pool = shared(backend)
    pool.blocks[0].view(np.float32).fill(math.nan)
    draw = runner.prepare(GREEDY)
    assert drawn(runner, [Feed(0, 0, (5,), draw, None, [mask_of([4], NUM_WORDS)])]) == [NOT_FINITE]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_moves_its_tokens_alone(backend: str) -> None:
    """One of padding moves nothing: the token cannot be drawn."""
    runner, _ = shared(backend)
    (first,) = drawn(runner, [Feed(0, 0, (5,), runner.prepare(GREEDY))])
    for bias, wanted in (
        (((9, 100.0),), 9),
        (((9, 100.0), (11, 40.0), (3, -100.0)), 9),
        (((first, 1.0),), first),
        (((295, 100.0),), first),
    ):
        draw = runner.prepare(replace(GREEDY, logit_bias=bias))
        feeds = [Feed(1, 0, (5,), draw), Feed(2, 0, (5,), runner.prepare(GREEDY))]
        shared(backend)
        assert drawn(runner, feeds) == [wanted, first]
    draw = runner.prepare(replace(GREEDY, logit_bias=((first, -100.0),)))
    shared(backend)
    assert drawn(runner, [Feed(1, 0, (5,), draw)]) != [first]
