"""When the kernels are used, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.cpu._native import Training
from model.ops.fused import kernels_for, rms_norm, swiglu, without_kernels


def test_kernels_are_used_where_a_gradient_is_wanted() -> None:
    x = torch.ones(2, 4)
    assert kernels_for(torch.float32, x) is None
    assert kernels_for(torch.float32, x.requires_grad_()) is not None
    assert kernels_for(torch.bfloat16, x.bfloat16(), x) is not None
    with torch.no_grad():
        assert kernels_for(torch.float32, x) is None


def test_kernels_can_be_disabled() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with without_kernels():
        assert kernels_for(torch.float32, x) is None
    assert kernels_for(torch.float32, x) is not None


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(0),
        torch.ones(2, device="meta"),
    ],
    ids=["float64", "bfloat16", "empty", "meta"],
)
def test_other_tensors_take_the_definition(other: Tensor) -> None:
    assert kernels_for(torch.float32, torch.ones(2, requires_grad=True), other) is None
    assert kernels_for(torch.float64, torch.ones(2, requires_grad=True)) is None


def test_inference_has_the_bits_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 24, generator=generator), torch.randn(24, generator=generator)
    assert torch.equal(rms_norm(x, weight, 1e-5), F.rms_norm(x, (24,), weight, 1e-5))
    gate, value = x.chunk(2, dim=-1)
    assert torch.equal(swiglu(x), F.silu(gate) * value)


def test_norm_has_the_dtype_of_products() -> None:
    x, weight = torch.ones(2, 4, requires_grad=True), torch.ones(4)
    assert rms_norm(x, weight, 1e-5).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rms_norm(x, weight, 1e-5).dtype == torch.bfloat16


REFUSED: dict[str, Callable[[Training], object]] = {
    "too short": lambda k: k.swiglu(torch.ones(2, 8), torch.ones(1, 4)),
    "odd width": lambda k: k.swiglu(torch.ones(2, 9), torch.ones(2, 4)),
    "two types": lambda k: k.swiglu(torch.ones(2, 8), torch.ones(2, 4).bfloat16()),
    "float64": lambda k: k.swiglu(torch.ones(2, 8).double(), torch.ones(2, 4).double()),
    "no sum": lambda k: k.norm(
        torch.ones(2, 4), torch.ones(2, 4), torch.ones(4), 1e-5, None, torch.ones(2, 4)
    ),
    "weight": lambda k: k.norm(
        torch.ones(2, 4), None, torch.ones(8), 1e-5, None, torch.ones(2, 4)
    ),
    "state": lambda k: k.convolution(
        torch.ones(1, 2, 4), torch.ones(4, 3), torch.ones(1, 1, 4), 0, 1, 1.0, 1e-6,
        torch.ones(1, 2, 4),
    ),
    "heads": lambda k: k.convolution(
        torch.ones(1, 2, 4), torch.ones(4, 1), torch.ones(1, 0, 4), 3, 2, 1.0, 1e-6,
        torch.ones(1, 2, 4),
    ),
    "qkv": lambda k: k.delta(
        torch.ones(1, 2, 11), torch.ones(1, 2, 1), torch.ones(1, 2, 1), torch.ones(1, 1, 4, 4),
        torch.ones(1, 2, 1, 4), torch.ones(1, 1, 2, 4), torch.ones(1, 1, 1, 4, 4),
        torch.ones(1, 1, 4, 4),
    ),
    "target": lambda k: k.cross_entropy(torch.ones(2, 4), torch.tensor([0, 4])),
    "targets": lambda k: k.cross_entropy(torch.ones(2, 4), torch.tensor([0])),
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_shapes_and_types_that_do_not_fit_are_refused(call: Callable[[Training], object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        call(Training())


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="v9"):
        Training("v9")
