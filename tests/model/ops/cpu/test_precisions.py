"""bfloat16, int8 and int4 weights: as the definition with weights rounded in the same way.

Inputs of int8 and int4 products are rounded too, to 127 steps of each row's largest
number, as are those of bfloat16 products at a level that multiplies bfloat16. There the
definition's inputs are rounded as well, and all that is left is the order of addition, and
an input that lies so near the middle of two steps that this order decides.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.overrides import TorchFunctionMode

from model.architectures.network import model_of
from model.config import ModelConfig
from model.lm import LanguageModel
from model.native.runtime import Runtime, levels
from tests.int4 import Q4Weights, to_int4
from tests.model.ops.cpu.models import (
    NAMES,
    ROUNDING_LEVELS,
    Shape,
    defined,
    feed,
    make_model,
    random_tokens,
    relative_error,
    state_error,
    states,
)
from tests.model.representatives import chosen
from tests.weights import weights_of

#: Matrices that are kept in the precision asked for; all else is float32.
TABLES = ("embedding.weight", "head.weight")
ROUNDED = ("embedding", "head", ".qkv", ".gate", ".out", "mlp.up", "mlp.down")
#: That of float32: nothing but the rounding of weights and inputs differs from it.
TOLERANCE = 5e-6
#: One input that is rounded to the other step moves what follows by this much.
OTHER_STEP_TOLERANCE = 2e-2
#: Of texts without such an input among the first half of their tokens.
SEEDS = {"bfloat16": 5, "int8": 5, "int4": 7}

Weights = dict[str, npt.NDArray[np.float32]]


class RoundedInputs(TorchFunctionMode):
    """Rounds what the definition multiplies with matrices of these weights' shapes."""

    def __init__(self, weights: Weights, dtype: str) -> None:
        super().__init__()
        self.shapes = {w.shape[::-1] for name, w in weights.items() if is_rounded(name, w)}
        self.rounding = to_bfloat16 if dtype == "bfloat16" else to_int8

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.__name__ in {"matmul", "__matmul__"} and tuple(args[1].shape) in self.shapes:
            x = self.rounding(args[0].float().numpy())
            args = (torch.from_numpy(x).double(), args[1])
        return func(*args, **(kwargs or {}))


def is_rounded(name: str, weight: npt.NDArray[np.float32]) -> bool:
    return weight.ndim == 2 and name.removesuffix(".weight").endswith(ROUNDED)


def rounded(weights: Weights, dtype: str) -> Weights:
    """``weights``, of which int4 leaves what is looked up or gives logits in int8."""
    result = dict(weights)
    for name, weight in weights.items():
        if is_rounded(name, weight):
            result[name] = ROUNDING["int8" if dtype == "int4" and name in TABLES else dtype](weight)
    return result


def to_bfloat16(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    result: npt.NDArray[np.float32] = torch.from_numpy(weight).bfloat16().float().numpy()
    return result


def to_int8(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each row as int8 times its largest size over 127."""
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
    return np.rint(rows / np.where(scale > 0, scale, np.float32(1))).astype(np.float32) * scale


ROUNDING = {"bfloat16": to_bfloat16, "int8": to_int8, "int4": to_int4}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("name", "level"), chosen(NAMES, levels()))
def test_runtime_equals_definition_with_what_it_rounds(name: str, level: str, dtype: str) -> None:
    """Weights, and inputs of products but for bfloat16 at a level without such products."""
    model = make_model(Shape({"head_dim": 18, "tie_word_embeddings": False}).config(name))
    weights, tokens = weights_of(model), random_tokens(model.config, 66, SEEDS[dtype])
    runtime = Runtime(model.config, weights, dtype, level=level)
    pool = runtime.empty_pool(1)
    found = torch.from_numpy(feed(runtime, pool, 0, tokens))
    rounds_inputs = dtype != "bfloat16" or level in ROUNDING_LEVELS
    with RoundedInputs(weights, dtype) if rounds_inputs else nullcontext():
        wanted, wanted_state = defined(model_of(model.config, rounded(weights, dtype)), tokens)
    tolerance = OTHER_STEP_TOLERANCE if rounds_inputs else TOLERANCE
    assert relative_error(found, wanted) <= tolerance
    assert state_error(states(model.config, pool[0]), wanted_state) <= tolerance
    errors = [relative_error(*each) for each in zip(found, wanted, strict=True)]
    assert np.median(errors) <= TOLERANCE


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("hidden_size", [24, 45, 130])
@pytest.mark.parametrize("vocab_size", [17, 300])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_product_of_integers_is_exact_but_for_its_rounding(
    level: str, hidden_size: int, vocab_size: int, dtype: str
) -> None:
    model, weights = one_product(hidden_size, vocab_size)
    stored = Q4Weights(weights) if dtype == "int4" else weights
    to = ROUNDING[dtype]
    tables = to(weights["embedding.weight"]), to(weights["head.weight"])
    check_one_product(Runtime(model.config, stored, dtype, level=level), weights, *tables)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("largest", [-8, -5, 3, 7])
def test_weights_that_are_int4_stay_as_they_are(level: str, largest: int) -> None:
    """Blocks of GGUF's Q4_0, whose largest code may be any."""
    model, weights = one_product(64, 257)
    draw = np.random.default_rng(abs(largest))
    for name in TABLES:
        codes = draw.integers(-abs(largest) + 1, abs(largest), (257, 2, 32))
        codes[..., 5] = largest
        scales = draw.uniform(-0.3, 0.3, (257, 2, 1)).astype(np.float16).astype(np.float32)
        weights[name] = (codes.astype(np.float32) * scales).reshape(257, 64)
    runtime = Runtime(model.config, Q4Weights(weights), "int4", level=level)
    check_one_product(runtime, weights, *(weights[name] for name in TABLES))


def test_matrix_that_a_file_of_int4_has_in_more_bits_is_int8() -> None:
    model, weights = one_product(64, 257)
    stored = Q4Weights(weights, others=("head.weight",))
    tables = to_int4(weights["embedding.weight"]), to_int8(weights["head.weight"])
    check_one_product(Runtime(model.config, stored, "int4"), weights, *tables)


def one_product(hidden_size: int, vocab_size: int) -> tuple[LanguageModel, Weights]:
    """With blocks that add nothing the logits are one product: norm, rounding, sums."""
    settings = {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    model = make_model(Shape(settings).config("vq"))
    weights = weights_of(model)
    for name in ("attention.out", "mlp.down"):
        weights[f"blocks.0.{name}.weight"][:] = 0.0
    return model, weights


def check_one_product(
    runtime: Runtime, weights: Weights, embedding: npt.NDArray[Any], head: npt.NDArray[Any]
) -> None:
    """That ``runtime`` computes with these numbers, and inputs of int8."""
    tokens = list(range(17))
    pool, draw = runtime.empty_pool(17), runtime.draw(temperature=0.0)
    runtime.run(pool, tokens, [0] * 17, [[token] for token in tokens], [draw] * 17)
    assert isinstance(runtime.config, ModelConfig)
    x = embedding[tokens].astype(np.float64)
    x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + runtime.config.rms_norm_eps)
    x = (x * weights["norm.weight"]).astype(np.float32)
    wanted = to_int8(x).astype(np.float64) @ head.astype(np.float64).T
    error = np.abs(runtime.logits() - wanted).max(-1) / np.abs(wanted).max(-1)
    # An input that lies between two steps may be rounded to either: one step of a weight.
    assert np.median(error) <= 1e-6
    assert error.max() <= 1e-2


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("int8", 1), ("int4", 18 / 32)]
)
def test_weights_take_the_bytes_of_their_precision(dtype: str, size: float) -> None:
    config = Shape(
        {"vocab_size": 512, "hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
    ).config("elu")
    model = make_model(config)
    weights = weights_of(model)
    stored = Q4Weights(weights) if dtype == "int4" else weights
    num_bytes = Runtime(config, stored, dtype).num_bytes
    # The embedding is kept twice, to be looked up and as the head.
    plain = size * (model.num_parameters() + 512 * 128)
    assert plain <= num_bytes <= 1.1 * plain


@pytest.mark.parametrize("level", levels())
def test_int4_weights_that_are_not_finite_give_no_finite_logits(level: str) -> None:
    model = make_model(Shape({"hidden_size": 64, "tie_word_embeddings": False}).config("elu"))
    weights = weights_of(model)
    weights["head.weight"][7, 40] = np.inf
    runtime = Runtime(model.config, Q4Weights(weights), "int4", level=level)
    found = feed(runtime, runtime.empty_pool(1), 0, list(range(9)))
    assert np.isnan(found[:, 7]).all()
    assert np.isfinite(np.delete(found, 7, axis=1)).all()
