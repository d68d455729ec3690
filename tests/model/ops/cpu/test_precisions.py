"""bfloat16 and int8 weights: as the definition with weights rounded in the same way.

Inputs of int8 products are rounded too, to 127 steps of each row's largest
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
from model.native.runtime import Runtime, levels
from tests.model.ops.cpu.models import (
    NAMES,
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
ROUNDED = ("embedding", "head", ".qkv", ".gate", ".out", "mlp.up", "mlp.down")
#: That of float32: nothing but the rounding of weights and inputs differs from it.
TOLERANCE = 5e-6
#: One input that is rounded to the other step moves what follows by this much.
OTHER_STEP_TOLERANCE = 2e-2

Weights = dict[str, npt.NDArray[np.float32]]


class RoundedInputs(TorchFunctionMode):
    """Rounds what the definition multiplies with matrices of these weights' shapes."""

    def __init__(self, weights: Weights, dtype: str) -> None:
        super().__init__()
        self.shapes = {w.shape[::-1] for name, w in weights.items() if is_rounded(name, w)}
        self.rounding = ROUNDING[dtype]

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
    to = ROUNDING[dtype]
    return {name: to(w) if is_rounded(name, w) else w for name, w in weights.items()}


def to_bfloat16(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    result: npt.NDArray[np.float32] = torch.from_numpy(weight).bfloat16().float().numpy()
    return result


def to_int8(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each row as int8 times its largest size over 127."""
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
    return np.rint(rows / np.where(scale > 0, scale, np.float32(1))).astype(np.float32) * scale


ROUNDING = {"bfloat16": to_bfloat16, "int8": to_int8}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("name", "level"), chosen(NAMES, levels()))
def test_runtime_equals_definition_with_what_it_rounds(name: str, level: str, dtype: str) -> None:
    """Weights, and inputs of int8 products and of bfloat16 products at the level that has these."""
    model = make_model(Shape({"head_dim": 18, "tie_word_embeddings": False}).config(name))
    weights, tokens = weights_of(model), random_tokens(model.config, 66)
    runtime = Runtime(model.config, weights, dtype, level=level)
    pool = runtime.empty_pool(1)
    found = torch.from_numpy(feed(runtime, pool, 0, tokens))
    rounds_inputs = dtype == "int8" or level == "v4dot"
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
def test_int8_product_is_exact_but_for_its_rounding(
    level: str, hidden_size: int, vocab_size: int
) -> None:
    """With blocks that add nothing the logits are one product: norm, rounding, integer sums."""
    settings = {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    model = make_model(Shape(settings).config("vq"))
    weights, tokens = weights_of(model), list(range(17))
    for name in ("attention.out", "mlp.down"):
        weights[f"blocks.0.{name}.weight"][:] = 0.0
    runtime = Runtime(model.config, weights, "int8", level=level)
    pool, draw = runtime.empty_pool(17), runtime.draw(temperature=0.0)
    runtime.run(pool, tokens, [0] * 17, [[token] for token in tokens], [draw] * 17)
    x = to_int8(weights["embedding.weight"])[tokens].astype(np.float64)
    x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + model.config.rms_norm_eps)
    x = (x * weights["norm.weight"]).astype(np.float32)
    wanted = to_int8(x).astype(np.float64) @ to_int8(weights["head.weight"]).astype(np.float64).T
    error = np.abs(runtime.logits() - wanted).max(-1) / np.abs(wanted).max(-1)
    # An input that lies between two steps may be rounded to either: one step of a weight.
    assert np.median(error) <= 1e-6
    assert error.max() <= 1e-2


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_weights_take_the_bytes_of_their_precision(dtype: str, size: int) -> None:
    config = Shape(
        {"vocab_size": 512, "hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
    ).config("elu")
    model = make_model(config)
    num_bytes = Runtime(config, weights_of(model), dtype).num_bytes
    # The embedding is kept twice, to be looked up and as the head.
    plain = size * (model.num_parameters() + 512 * 128)
    assert plain <= num_bytes <= 1.1 * plain
