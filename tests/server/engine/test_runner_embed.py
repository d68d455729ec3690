"""Both runners: the sum of a text's last hidden states, and the state that it leaves."""

from __future__ import annotations

from functools import reduce

import numpy as np
import numpy.typing as npt
import pytest
import torch

from model.architectures.network import model_of
from model.attention import MECHANISMS, spec_of
from server.engine.runner import HIDDEN_UNIT, Feed, Runner
from server.engine.types import SamplingParams
from tests.server.engine.runners import BACKENDS, TOLERANCE, make_pool, make_runner
from tests.tiny import tiny_checkpoint

#: A choice; that of dijiang has no parallel form in float64.
DEFINED = ["delta", "elu", "gated", "performer", "retnet", "vq"]
NAMES = [name for name in MECHANISMS if spec_of(name).constant_state]
#: Sizes on the grid of torch; each is one call.
CUT = (64, 16, 16, 1, 1)
TEXT = tuple((7 * i * i + 3 * i) % 290 for i in range(sum(CUT)))


def parts_of(runner: Runner, slot: int) -> list[npt.NDArray[np.float64]]:
    found, start = [], 0
    for size in CUT:
        found.append(runner.embed(Feed(slot, start, TEXT[start : start + size])))
        start += size
    return found


def wanted_of(name: str) -> tuple[npt.NDArray[np.float64], float]:
    """The sum of the parallel form's states in float64, and how far float32 may be from it."""
    checkpoint = tiny_checkpoint(name)
    model = model_of(checkpoint.config, checkpoint.weights, torch.float64)
    hidden = model.hidden_parallel(torch.tensor([TEXT]))[0]
    return hidden.sum(dim=0).numpy(), len(TEXT) * TOLERANCE * float(hidden.abs().max())


@pytest.mark.parametrize("name", DEFINED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sum_equals_that_of_the_parallel_form(backend: str, name: str) -> None:
    wanted, bound = wanted_of(name)
    found = sum(parts_of(make_runner(backend, make_pool(name), name), 2))
    assert np.abs(found - wanted).max() <= bound


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_embedding_leaves_the_bits_that_running_leaves(backend: str, name: str) -> None:
    """And in another slot, with others beside it before and after, gives the same bits."""
    pool = make_pool(name)
    runner = make_runner(backend, pool, name)
    start = 0
    for size in CUT:
        tokens = TEXT[start : start + size]
        runner.run([Feed(slot, start, tokens) for slot in (0, 3)])
        first = runner.embed(Feed(1, start, tokens))
        assert runner.embed(Feed(2, start, tokens)).tobytes() == first.tobytes()
        start += size
        assert all((pool.block(slot) == pool.block(0)).all() for slot in (1, 2))


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
    pool = make_pool()
    runner = make_runner(backend, pool)
    wanted = runner.embed(Feed(0, 0, TEXT[:size]))
    pool.block(1).view(np.float32).fill(np.nan)
    assert np.isnan(runner.embed(Feed(1, 0, TEXT[:size]))).all()
    assert runner.embed(Feed(2, 0, TEXT[:size])).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("tokens", [(300,), (-1,), (*range(15), 300)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_id_that_cannot_be_read_changes_nothing(backend: str, tokens: tuple[int, ...]) -> None:
    pool = make_pool()
    runner = make_runner(backend, pool)
    with pytest.raises((ValueError, IndexError)):
        runner.embed(Feed(0, 0, tokens))
    assert not pool.blocks.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_last_run_said_stays_until_the_next(backend: str) -> None:
    """Neither an embedding nor a score draws anything."""
    runner = make_runner(backend, make_pool())
    draw = runner.prepare(SamplingParams(top_logprobs=2))
    runner.run([Feed(slot, 0, TEXT[:1], draw) for slot in range(2)])
    before = runner.logprobs(), runner.top_logprobs()
    runner.embed(Feed(2, 0, TEXT[:16]))
    runner.score(Feed(3, 0, TEXT[:1]), 5)
    assert (runner.logprobs(), runner.top_logprobs()) == before
    runner.run([Feed(0, 1, TEXT[1:2])])
    assert np.isnan(runner.logprobs()).tolist() == [True]
