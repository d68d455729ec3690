"""Mamba on the native runtime equals torch and `transformers`, with weights of any precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.studies.drift.__main__ import Float64
from model.architectures.network import ModelState, Network, model_of
from model.attention.base import State
from model.native.runtime import DTYPES, Runtime, levels
from tests.mamba import SHAPES, drawn, theirs
from tests.model.ops.cpu.models import (
    ROUNDING_LEVELS,
    feed,
    random_tokens,
    relative_error,
    state_error,
    states,
)
from tests.model.ops.cpu.test_precisions import OTHER_STEP_TOLERANCE, ROUNDING

#: Of float32 logits and states, relative to the largest: sums of up to 512 numbers in order.
TOLERANCE = 1e-5
#: The distance of `transformers` from the equations, which is float32 too.
THEIR_TOLERANCE = 5e-5
#: Mamba-1 in float64 runs token by token, which takes longer.
LONG = [("grouped", 100_000), ("falcon", 40_000)]


@pytest.fixture(params=SHAPES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def read(runtime: Runtime, tokens: list[int]) -> tuple[Tensor, tuple[State, ...]]:
    """The logits after a prompt that is fed at once, and the state."""
    pool = runtime.empty_pool(1)
    runtime.run(pool, [0], [0], [tokens], [runtime.draw(temperature=0.0)])
    return torch.from_numpy(runtime.logits()[0]), states(runtime.config, pool[0])


def on_torch(model: Network, tokens: list[int]) -> tuple[Tensor, ModelState]:
    """Logits [T, vocabulary] and the state."""
    state, position = model.empty_state(1), torch.zeros(1, dtype=torch.int64)
    logits, state = model.chunk(torch.tensor([tokens]), state, position)
    return logits[0], state


@pytest.mark.parametrize("level", levels())
def test_prompt_and_steps_equal_torch_and_transformers(name: str, level: str) -> None:
    config, weights = SHAPES[name], drawn(name)
    runtime = Runtime(config, weights, "float32", level=level)
    tokens = random_tokens(config, 70)
    wanted, wanted_state = on_torch(model_of(config, weights), tokens)
    last, state = read(runtime, tokens)
    assert relative_error(last, wanted[-1]) <= TOLERANCE
    assert state_error(state, wanted_state) <= TOLERANCE
    found = torch.from_numpy(feed(runtime, runtime.empty_pool(1), 0, tokens))
    assert relative_error(found, wanted) <= TOLERANCE
    theirs_say = theirs(name)(torch.tensor([tokens])).logits[0]
    assert relative_error(found, theirs_say) <= THEIR_TOLERANCE


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rounded_weights_equal_torch_with_these(name: str, dtype: str, level: str) -> None:
    """And with inputs of products rounded, where the runtime rounds them."""
    config, weights = SHAPES[name], drawn(name)
    matrices = {
        key: ROUNDING[dtype](array) if key.endswith(".weight") and array.ndim == 2 else array
        for key, array in weights.items()
    }
    rounding = dtype == "int8" or level in ROUNDING_LEVELS
    tokens = random_tokens(config, 40)
    with RoundedInputs(ROUNDING[dtype] if rounding else lambda x: x):
        wanted, wanted_state = on_torch(model_of(config, matrices), tokens)
    last, state = read(Runtime(config, weights, dtype, level=level), tokens)
    tolerance = OTHER_STEP_TOLERANCE if rounding else TOLERANCE
    assert relative_error(last, wanted[-1]) <= tolerance
    assert state_error(state, wanted_state) <= tolerance


class RoundedInputs(TorchFunctionMode):
    """Rounds what is multiplied with matrices of weights."""

    def __init__(self, rounding: Callable[[Any], Any]) -> None:
        super().__init__()
        self.rounding = rounding

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            rows = args[0].flatten(0, -2)
            rounded = torch.from_numpy(self.rounding(rows.numpy())).view_as(args[0])
            args = (rounded, *args[1:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [-30.0, 30.0])
@pytest.mark.parametrize("name", ["odd", "falcon"], indirect=True)
def test_state_stays_finite_with_steps_of_nothing_and_large_ones(
    name: str, dtype: str, bias: float
) -> None:
    weights = {
        key: array * 0 + bias if key.endswith(("dt_bias", "dt.bias")) else array
        for key, array in drawn(name).items()
    }
    runtime = Runtime(SHAPES[name], weights, dtype)
    logits, state = read(runtime, random_tokens(runtime.config, 3000))
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(t).all() for layer in state for t in layer.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), LONG, indirect=["name"])
def test_a_long_text_stays_with_the_equations_in_float64(name: str, length: int) -> None:
    """Rounding does not add up: the error after many tokens is that after few."""
    config, weights = SHAPES[name], drawn(name)
    exact = copy.deepcopy(model_of(config, weights)).double()
    runtime = Runtime(config, weights, "float32")
    tokens, pool = random_tokens(config, length), runtime.empty_pool(1)
    position = torch.zeros(1, dtype=torch.int64)
    with Float64():
        state = tuple(
            {key: tensor.double() for key, tensor in layer.items()}
            for layer in exact.empty_state(1)
        )
        for at in range(0, length, 1000):
            part = tokens[at : at + 1000]
            wanted, state = exact.chunk(torch.tensor([part]), state, position)
            runtime.run(pool, [0], [at], [part], [runtime.draw(temperature=0.0)])
    assert relative_error(torch.from_numpy(runtime.logits()[0]), wanted[0, -1]) <= TOLERANCE
    assert state_error(states(config, pool[0]), state) <= TOLERANCE
