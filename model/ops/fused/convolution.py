"""The short convolution in front of the heads, its silu, and the unit length of q and k.

    y = silu(convolution(x)),   q = K^-1/2 y_q / |y_q|,   k = y_k / |y_k|   per head

with |y| = sqrt(sum y^2 + `EPSILON`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.ops.convolution import convolution_chunk
from model.ops.fused.native import Training, kernels_for

EPSILON = 1e-6


def convolved_silu(
    x: Tensor, weight: Tensor, state: Tensor, unit: int = 0, head: int = 1
) -> tuple[Tensor, Tensor]:
    """The short convolution and its silu, and the convolution's new state.

    ``x`` [B, T, D], ``weight`` [D, W], ``state`` [B, W - 1, D] float32. The first ``unit``
    channels are the queries and as many after them the keys of heads of ``head`` channels,
    which get unit length as in the module's docstring. Returns [B, T, D] in the dtype of ``x``.
    """
    kernels = kernels_for(x.dtype, x, weight) if state.dtype == torch.float32 else None
    if kernels is None:
        y, state = convolution_chunk(x, weight, state)
        y = F.silu(y)
        return (unit_heads(_at_least_float32(y), unit, head) if unit else y), state
    y = Convolution.apply(kernels, x, weight, state, unit, head)  # type: ignore[no-untyped-call]
    return cast(Tensor, y), _last_inputs(x, state)


def unit_length(x: Tensor) -> Tensor:
    """``x`` [..., K] divided by its length."""
    return x * (x.square().sum(dim=-1, keepdim=True) + EPSILON).rsqrt()


def unit_heads(y: Tensor, unit: int, head: int) -> Tensor:
    """The first ``unit`` channels of ``y`` [..., D], and as many after them, as q and k above."""
    q, k, v = y.split([unit, unit, y.shape[-1] - 2 * unit], dim=-1)
    q, k = (unit_length(t.unflatten(-1, (-1, head))).flatten(-2) for t in (q, k))
    return torch.cat([q * head**-0.5, k, v], dim=-1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _last_inputs(x: Tensor, state: Tensor) -> Tensor:
    """The last W - 1 of the inputs, the state's before those of ``x``, in float32."""
    kept = state.shape[1]
    if x.shape[1] < kept:
        return torch.cat([state[:, x.shape[1] :], x.float()], dim=1)
    return x[:, x.shape[1] - kept :].float()


class Convolution(torch.autograd.Function):
    """`convolved_silu` with the kernels ``kernels``, without the new state."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Training, x: Tensor, weight: Tensor, state: Tensor, unit: int, head: int
    ) -> Tensor:
        x, weight, state = (t.detach().contiguous() for t in (x, weight, state))
        ctx.kernels, ctx.heads = kernels, (unit, head)
        ctx.save_for_backward(x, weight, state)
        out = torch.empty_like(x)
        kernels.convolution(x, weight, state, unit, head, head**-0.5, EPSILON, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, state = ctx.saved_tensors
        grad_x, grad_weight, grad_state = (torch.empty_like(t) for t in (x, weight, state))
        unit, head = ctx.heads
        ctx.kernels.convolution_backward(
            *(x, weight, state, unit, head, head**-0.5, EPSILON),
            *(grads[0].contiguous(), grad_x, grad_weight, grad_state),
        )
        return None, grad_x, grad_weight, grad_state, None, None
