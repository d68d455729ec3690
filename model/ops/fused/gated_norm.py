"""The norm of a head's output with its gate: ``rms_norm(x) * weight * silu(gate)``."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.ops.fused.native import Training, kernels_for


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, epsilon: float) -> Tensor:
    """``x``, ``gate`` [..., V] and ``weight`` [V] to [..., V] in the dtype of ``gate``."""
    kernels = kernels_for(gate.dtype, x, weight, gate)
    if kernels is None:
        normed = F.rms_norm(x, x.shape[-1:], eps=epsilon) * weight.float()
        return normed.to(gate.dtype) * F.silu(gate)
    return cast(Tensor, GatedNorm.apply(kernels, x.to(gate.dtype), weight, gate, epsilon))  # type: ignore[no-untyped-call]


class GatedNorm(torch.autograd.Function):
    """`gated_rms_norm` with the kernels ``kernels``."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Training, x: Tensor, weight: Tensor, gate: Tensor, epsilon: float
    ) -> Tensor:
        x, weight, gate = (t.detach().contiguous() for t in (x, weight, gate))
        ctx.kernels, ctx.epsilon = kernels, epsilon
        ctx.save_for_backward(x, weight, gate)
        out = torch.empty_like(gate)
        kernels.gated_norm(x, weight, gate, epsilon, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        grad_x, grad_weight, grad_gate = (torch.empty_like(t) for t in (x, weight, gate))
        ctx.kernels.gated_norm_backward(
            x, weight, gate, ctx.epsilon, grads[0].contiguous(), grad_x, grad_gate, grad_weight
        )
        return None, grad_x, grad_weight, grad_gate, None
