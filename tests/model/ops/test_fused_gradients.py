"""Each kernel at each level of vector instructions against its definition in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from model.ops.cpu._native import Training, levels
from model.ops.fused import (
    AddNorm,
    Convolution,
    Delta,
    GatedNorm,
    Norm,
    Swiglu,
    add_rms_norm,
    convolved_silu,
    gated_rms_norm,
    packed_delta_chunk,
    rms_norm,
    swiglu,
)

EPSILON = 1e-5
#: Of the norm of a result, float32 and eight roundings to bfloat16.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8 * 2**-9}


@dataclass(frozen=True)
class Case:
    """One operation with inputs, of which those in ``low`` have the dtype of activations."""

    name: str
    kernel: Callable[..., tuple[Tensor, ...]]
    definition: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    low: tuple[int, ...]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_case(shape: tuple[int, ...]) -> Case:
    def kernel(kernels: Training, dtype: torch.dtype, x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (Norm.apply(kernels, x, w, EPSILON, dtype),)

    inputs = (random(*shape), random(shape[-1], seed=1))
    return Case(f"norm-{shape}", kernel, lambda x, w: (rms_norm(x, w, EPSILON),), inputs, ())


def add_norm_case(shape: tuple[int, ...]) -> Case:
    inputs = (random(*shape), random(*shape, seed=1), random(shape[-1], seed=2))
    return Case(
        f"add_norm-{shape}",
        lambda kernels, _, *args: AddNorm.apply(kernels, *args, EPSILON),
        lambda *args: add_rms_norm(*args, EPSILON),
        inputs,
        (1,),
    )


def gated_norm_case(shape: tuple[int, ...]) -> Case:
    inputs = (random(*shape), random(shape[-1], seed=1), random(*shape, seed=2))
    return Case(
        f"gated_norm-{shape}",
        lambda kernels, _, *args: (GatedNorm.apply(kernels, *args, EPSILON),),
        lambda *args: (gated_rms_norm(*args, EPSILON),),
        inputs,
        (0, 2),
    )


def swiglu_case(shape: tuple[int, ...]) -> Case:
    return Case(
        f"swiglu-{shape}",
        lambda kernels, _, up: (Swiglu.apply(kernels, up),),
        lambda up: (swiglu(up),),
        (random(*shape),),
        (0,),
    )


def convolution_case(num_tokens: int, width: int, size: int, unit: int, head: int) -> Case:
    inputs = (
        random(2, num_tokens, width),
        random(width, size, seed=1),
        random(2, size - 1, width, seed=2),
    )
    return Case(
        f"convolution-{num_tokens}-{width}-{size}-{unit}",
        lambda kernels, _, *args: (Convolution.apply(kernels, *args, unit, head),),
        lambda *args: convolved_silu(*args, unit, head)[:1],
        inputs,
        (0,),
    )


def delta_case(num_tokens: int, heads: int, key: int, value: int, decay: float) -> Case:
    q, k = (random(2, num_tokens, heads, key, seed=seed) for seed in (0, 1))
    k = k / k.norm(dim=-1, keepdim=True)
    v = random(2, num_tokens, heads, value, seed=2)
    log_decay = random(2, num_tokens, heads, seed=4).abs() * -decay
    log_decay[:, num_tokens // 2] *= 100  # one that forgets much, among slow ones
    inputs = (
        torch.cat([t.flatten(-2) for t in (q, k, v)], dim=-1),
        random(2, num_tokens, heads, seed=3).sigmoid(),
        log_decay,
        random(2, heads, key, value, seed=5),
    )
    return Case(
        f"delta-{num_tokens}-{heads}-{key}-{value}-{decay}",
        lambda kernels, _, *args: Delta.apply(kernels, *args),
        packed_delta_chunk,
        inputs,
        (0,),
    )


CASES = [
    *(norm_case(shape) for shape in ((3, 256), (2, 5, 7))),
    *(add_norm_case(shape) for shape in ((3, 256), (2, 5, 24))),
    *(gated_norm_case(shape) for shape in ((5, 2, 64), (3, 9))),
    *(swiglu_case(shape) for shape in ((3, 1280), (2, 2, 14))),
    convolution_case(num_tokens=70, width=192, size=4, unit=64, head=32),
    convolution_case(num_tokens=2, width=27, size=4, unit=9, head=9),
    convolution_case(num_tokens=5, width=20, size=2, unit=0, head=1),
    convolution_case(num_tokens=3, width=20, size=1, unit=0, head=1),
    delta_case(num_tokens=150, heads=2, key=64, value=64, decay=0.01),
    delta_case(num_tokens=64, heads=1, key=24, value=40, decay=1.0),
    delta_case(num_tokens=3, heads=3, key=8, value=8, decay=0.0),
    delta_case(num_tokens=65, heads=1, key=96, value=33, decay=50.0),
]


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_equals_definition(case: Case, dtype: torch.dtype, level: str) -> None:
    """Results and the gradients of all inputs, from the gradients of all results."""
    inputs = [t.to(dtype) if i in case.low else t for i, t in enumerate(case.inputs)]
    kernels = Training(level)
    found = gradients(lambda *args: case.kernel(kernels, dtype, *args), inputs)
    wanted = gradients(case.definition, [t.double() for t in inputs])
    for actual, exact in zip(found, wanted, strict=True):
        error = (actual.double() - exact).norm() / exact.norm().clamp_min(1e-9)
        assert error <= TOLERANCES[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("used", [0, 1], ids=["outputs", "state"])
@pytest.mark.parametrize("level", levels())
def test_a_result_without_a_gradient_counts_as_zero(level: str, used: int) -> None:
    case = delta_case(num_tokens=70, heads=1, key=8, value=8, decay=0.1)
    kernels, exact_inputs = Training(level), [t.double() for t in case.inputs]
    found = gradients(lambda *args: [Delta.apply(kernels, *args)[used]], case.inputs)
    wanted = gradients(lambda *args: [packed_delta_chunk(*args)[used]], exact_inputs)
    for actual, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-4, atol=1e-5)


def gradients(operation: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results, and the gradients of the inputs where those of the results are random."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    results = operation(*leaves)
    # Rounded, so that they are the same for every dtype.
    given = [random(*t.shape, seed=10 + i).bfloat16().to(t.dtype) for i, t in enumerate(results)]
    grads = torch.autograd.grad(results, leaves, given, allow_unused=True)
    zeros = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]
    return [*(t.detach() for t in results), *zeros]
