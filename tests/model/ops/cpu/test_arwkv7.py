"""ARWKV on the native runtime equals its published equations, with and without gate and norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention.base import State
from model.native.runtime import DTYPES, Runtime, levels
from tests.arwkv7 import SHAPES, our_weights, published
from tests.model.architectures.arwkv7_oracle import oracle
from tests.model.ops.cpu.models import (
    ROUNDING_LEVELS,
    feed,
    random_tokens,
    relative_error,
    state_error,
    states,
)
from tests.model.ops.cpu.test_precisions import OTHER_STEP_TOLERANCE, ROUNDING
from tests.model.ops.cpu.test_rwkv7 import RoundedInputs
from tests.rwkv7 import Published

#: Of float32 logits and states, relative to the largest: sums of up to 256 numbers in order. A norm
#: divides a head's output by its size, which may be small.
TOLERANCE = {"odd": 1e-5, "odd_gated": 3e-5, "plain": 1e-5, "gated": 1e-5, "both": 3e-4}
MATRICES = ("embed_tokens.weight", "lm_head.weight", "_proj.weight")
MATRICES += tuple(f"{name}.weight" for name in ("receptance", "key", "value", "output"))
LOW_RANKS = tuple(f"time_mixer.{letter}{n}" for letter in "wavg" for n in "12")


def runtime_of(name: str, dtype: str = "float32", level: str | None = None) -> Runtime:
    shape = SHAPES[name]
    return Runtime(shape.config, our_weights(shape, published(shape)), dtype, level=level)


def state_of(wanted: list[dict[str, Tensor]]) -> tuple[State, ...]:
    """Of the oracle, as a session has it."""
    layers = [{**layer, "S": layer["S"].transpose(-1, -2)} for layer in wanted]
    return tuple({key: tensor[None] for key, tensor in layer.items()} for layer in layers)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", TOLERANCE)
def test_prompt_and_steps_equal_the_equations(name: str, level: str) -> None:
    runtime = runtime_of(name, level=level)
    tokens, pool = random_tokens(runtime.config, 70), runtime.empty_pool(2)
    wanted, wanted_state = oracle(published(SHAPES[name]), tokens)
    runtime.run(pool, [1], [0], [tokens], [runtime.draw(temperature=0.0)])
    assert relative_error(torch.from_numpy(runtime.logits()[0]), wanted[-1]) <= TOLERANCE[name]
    assert state_error(states(runtime.config, pool[1]), state_of(wanted_state)) <= TOLERANCE[name]
    found = torch.from_numpy(feed(runtime, pool, 0, tokens))
    assert relative_error(found, wanted) <= TOLERANCE[name]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["odd", "odd_gated"])
def test_rounded_weights_equal_the_equations_with_these(name: str, dtype: str) -> None:
    """And with inputs of products rounded, where the runtime rounds them."""
    runtime, weights = runtime_of(name, dtype), published(SHAPES[name])
    tokens, pool = random_tokens(runtime.config, 40), runtime.empty_pool(1)
    found = torch.from_numpy(feed(runtime, pool, 0, tokens))
    rounds = dtype == "int8" or runtime.level in ROUNDING_LEVELS
    inputs: Callable[[Any], Any] = ROUNDING[dtype] if rounds else lambda x: x
    with RoundedInputs(SHAPES[name].head_dim, inputs):
        wanted, wanted_state = oracle(rounded(weights, dtype), tokens)
    tolerance = OTHER_STEP_TOLERANCE if rounds else TOLERANCE[name]
    assert relative_error(found, wanted) <= tolerance
    assert state_error(states(runtime.config, pool[0]), state_of(wanted_state)) <= tolerance
    first = [relative_error(*each) for each in zip(found[:4], wanted[:4], strict=True)]
    assert min(first) <= TOLERANCE[name]  # most inputs lie clear of the middle of two steps


def rounded(weights: Published, dtype: str) -> Published:
    """As the runtime keeps them; rows of low-rank matrices are their columns in the file."""

    def kept(key: str, tensor: Tensor) -> Tensor:
        if not key.endswith((*MATRICES, *LOW_RANKS)):
            return tensor
        turned = key.endswith(LOW_RANKS)
        rows = tensor.T.contiguous() if turned else tensor
        found = torch.from_numpy(ROUNDING[dtype](rows.numpy()))
        return found.T if turned else found

    return {key: kept(key, tensor) for key, tensor in weights.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "normed", "both"])
def test_batch_cut_and_threads_do_not_change_bits(name: str, dtype: str) -> None:
    shape = SHAPES[name]
    weights = our_weights(shape, published(shape))
    two, one = (Runtime(shape.config, weights, dtype, threads) for threads in (2, 1))
    texts = [random_tokens(shape.config, length, length) for length in (2, 7, 33)]
    pool, draw = two.empty_pool(3), two.draw(temperature=0.0)
    cuts = [len(text) // 3 + 1 for text in texts]
    heads = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    tails = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    two.run(pool, [0, 1, 2], [0, 0, 0], heads, [None] * 3)
    two.run(pool, [0, 1, 2], cuts, tails, [draw] * 3)
    for slot, text in enumerate(texts):
        alone = one.empty_pool(1)
        one.run(alone, [0], [0], [text], [draw])
        assert pool[slot].tobytes() == alone.tobytes()
        assert two.logits()[slot].tobytes() == one.logits()[0].tobytes()
