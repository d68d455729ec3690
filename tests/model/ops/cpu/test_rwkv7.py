"""RWKV-7 on the native runtime equals its published equations, and the `rwkv` package."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.attention.base import State
from model.native.runtime import DTYPES, Runtime, levels
from tests.model.architectures.rwkv7_oracle import oracle
from tests.model.architectures.rwkv7_package import run_package
from tests.model.ops.cpu.models import (
    ROUNDING_LEVELS,
    feed,
    random_tokens,
    relative_error,
    state_error,
    states,
)
from tests.model.ops.cpu.test_precisions import OTHER_STEP_TOLERANCE, ROUNDING
from tests.rwkv7 import SHAPES, Published, filled, our_weights, published, write_pth

#: Of float32 logits and states, relative to the largest: sums of up to 512 numbers in order.
TOLERANCE = 1e-5
#: The package's own distance from the equations; as in tests/model/architectures/test_rwkv7.py.
PACKAGE_TOLERANCE = 1e-4
#: Matrices that are kept in the precision asked for, by the ends of their published names.
LOW_RANKS = tuple(f"att.{letter}{n}" for letter in "wavg" for n in "12")
MATRICES = ("emb.weight", "head.weight", "receptance.weight", "key.weight", "value.weight")
MATRICES += ("output.weight", *LOW_RANKS)


@pytest.fixture(params=["odd", "square"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def runtime_of(
    name: str, dtype: str = "float32", level: str | None = None, weights: Published | None = None
) -> Runtime:
    shape = SHAPES[name]
    ours = our_weights(shape, weights or published(shape))
    return Runtime(shape.config, ours, dtype, level=level)


def state_of(wanted: list[dict[str, Tensor]]) -> tuple[State, ...]:
    """Of the oracle, as a session has it."""
    layers = [{**layer, "S": layer["S"].transpose(-1, -2)} for layer in wanted]
    return tuple({key: tensor[None] for key, tensor in layer.items()} for layer in layers)


def read(runtime: Runtime, tokens: list[int]) -> tuple[Tensor, tuple[State, ...]]:
    """The logits after a prompt that is fed at once, and the state."""
    pool = runtime.empty_pool(1)
    runtime.run(pool, [0], [0], [tokens], [runtime.draw(temperature=0.0)])
    return torch.from_numpy(runtime.logits()[0]), states(runtime.config, pool[0])


@pytest.mark.parametrize("level", levels())
def test_prompt_and_steps_equal_the_equations(name: str, level: str) -> None:
    runtime = runtime_of(name, level=level)
    tokens, pool = random_tokens(runtime.config, 70), runtime.empty_pool(1)
    wanted, wanted_state = oracle(published(SHAPES[name]), tokens)
    last, state = read(runtime, tokens)
    assert relative_error(last, wanted[-1]) <= TOLERANCE
    assert state_error(state, state_of(wanted_state)) <= TOLERANCE
    assert relative_error(torch.from_numpy(feed(runtime, pool, 0, tokens)), wanted) <= TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_that_is_normed_already_is_taken_as_it_is(dtype: str) -> None:
    """Float32 numbers and those that the other dtypes keep as they are: of a norm of ones."""
    weights, shape = published(SHAPES["square"]), SHAPES["square"]
    signs = torch.randn(shape.vocab_size, shape.width // 2).sign()
    weights["emb.weight"] = torch.cat([signs, -signs], dim=1)
    weights["blocks.0.ln0.weight"] = torch.full((shape.width,), math.sqrt(1 + 1e-5))
    weights["blocks.0.ln0.bias"] = torch.zeros(shape.width)
    config = dataclasses.replace(shape.config, embedding_norm=False)
    rows = our_weights(shape, weights)
    found = Runtime(config, {n: t for n, t in rows.items() if "embedding_norm" not in n}, dtype)
    tokens = random_tokens(config, 20)
    wanted = read(Runtime(shape.config, rows, dtype), tokens)[0]
    assert relative_error(read(found, tokens)[0], wanted) <= TOLERANCE


@pytest.mark.package
@pytest.mark.parametrize("name", ["deep"])
def test_equals_the_rwkv_package(tmp_path: Path, name: str) -> None:
    """Logits and state after a prompt, then 300 greedy tokens and what follows them."""
    runtime, weights = runtime_of(name), published(SHAPES[name])
    prompt, pool = random_tokens(runtime.config, 50), runtime.empty_pool(1)
    package = run_package(write_pth(tmp_path / "model.pth", weights), prompt, 300)
    draw = runtime.draw(temperature=0.0)
    ((token,),) = runtime.run(pool, [0], [0], [prompt], [draw])
    near(runtime.logits()[0], package["logits"][-1])
    for layer, tensors in enumerate(states(runtime.config, pool[0])):
        near(tensors["S"][0].transpose(-1, -2).numpy(), package[f"{layer}.S"])
        near(tensors["time_shift"][0].numpy(), package[f"{layer}.time_shift"])
        near(tensors["channel_shift"][0].numpy(), package[f"{layer}.channel_shift"])
    tokens = []
    for position in range(50, 350):
        tokens.append(token)
        ((token,),) = runtime.run(pool, [0], [position], [[token]], [draw])
    assert tokens == package["tokens"].tolist()
    near(runtime.logits()[0], package["last"])


def near(found: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> None:
    error = relative_error(torch.from_numpy(found), torch.from_numpy(wanted))
    assert error <= PACKAGE_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rounded_weights_equal_the_equations_with_these(name: str, dtype: str, level: str) -> None:
    """And with inputs of products rounded, where the runtime rounds them."""
    runtime, weights = runtime_of(name, dtype, level), published(SHAPES[name])
    tokens, pool = random_tokens(runtime.config, 40), runtime.empty_pool(1)
    found = torch.from_numpy(feed(runtime, pool, 0, tokens))
    rounding = dtype == "int8" or level in ROUNDING_LEVELS
    inputs: Callable[[Any], Any] = ROUNDING[dtype] if rounding else lambda x: x
    with RoundedInputs(SHAPES[name].head_dim, inputs):
        wanted, wanted_state = oracle(rounded(weights, dtype), tokens)
    tolerance = OTHER_STEP_TOLERANCE if rounding else TOLERANCE
    assert relative_error(found, wanted) <= tolerance
    assert state_error(states(runtime.config, pool[0]), state_of(wanted_state)) <= tolerance
    first = [relative_error(*each) for each in zip(found[:4], wanted[:4], strict=True)]
    assert min(first) <= TOLERANCE  # most inputs lie clear of the middle of two steps


class RoundedInputs(TorchFunctionMode):
    """Rounds the vectors that the oracle multiplies with matrices, a head's state excepted."""

    def __init__(self, head_dim: int, rounding: Callable[[Any], Any]) -> None:
        super().__init__()
        self.state, self.rounding = (head_dim, head_dim), rounding

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ in {"matmul", "__matmul__"} and args[0].dim() + args[1].dim() == 3:
            matrix = max(args[:2], key=Tensor.dim)
            if tuple(matrix.shape) != self.state:
                args = tuple(x if x is matrix else self.rounded(x) for x in args)
        return func(*args, **(kwargs or {}))

    def rounded(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.rounding(x.float().numpy())).double()


def rounded(weights: Published, dtype: str) -> Published:
    """Row by row, and low-rank matrices are stored [in, out]."""

    def matrix(key: str, tensor: Tensor) -> Tensor:
        if not key.endswith(MATRICES):
            return tensor
        tensor = tensor.T if key.endswith(LOW_RANKS) else tensor
        found = torch.from_numpy(ROUNDING[dtype](np.ascontiguousarray(tensor.numpy())))
        return found.T if key.endswith(LOW_RANKS) else found

    return {key: matrix(key, tensor) for key, tensor in weights.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_stays_finite_with_decays_and_rates_at_their_ends(dtype: str) -> None:
    """A long text with the slowest and the fastest decay, and with full removal."""
    for decay, rate in ((-30.0, 30.0), (30.0, 30.0), (-30.0, -30.0), (-6.0, 2.0)):
        runtime = runtime_of("odd", dtype, weights=filled(SHAPES["odd"], w0=decay, a0=rate))
        logits, state = read(runtime, random_tokens(runtime.config, 3000))
        assert torch.isfinite(logits).all()
        assert all(torch.isfinite(t).all() for layer in state for t in layer.values())


@pytest.mark.parametrize("values", [{"w0": 30.0, "a0": 30.0}, {"k_k": 0.0}])
def test_extreme_weights_equal_the_equations(name: str, values: dict[str, float]) -> None:
    """The fastest decay and full removal; a removal key of zeros, whose norm has a floor."""
    weights = filled(SHAPES[name], **values)
    runtime = runtime_of(name, weights=weights)
    tokens = random_tokens(runtime.config, 48)
    assert relative_error(read(runtime, tokens)[0], oracle(weights, tokens)[0][-1]) <= TOLERANCE


def test_scores_equal_the_equations(name: str) -> None:
    runtime = runtime_of(name)
    tokens = random_tokens(runtime.config, 151)
    found = runtime.score(runtime.empty_pool(1), 0, 0, tokens[:-1], tokens[-1])
    logits, _ = oracle(published(SHAPES[name]), tokens[:-1])
    wanted = logits.log_softmax(-1)[torch.arange(150), tokens[1:]].numpy()
    assert np.abs(np.array(found) - wanted).max() <= 2 * TOLERANCE * float(logits.abs().max())
    assert math.isclose(sum(found), wanted.sum(), rel_tol=1e-5)
