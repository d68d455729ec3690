"""The activation of SwiGLU: ``silu(gate) * value`` for both halves of one product."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.ops.fused.native import Training, kernels_for


def swiglu(up: Tensor) -> Tensor:
    """``up`` [..., 2 I], gate and value, to [..., I] in its dtype."""
    kernels = kernels_for(up.dtype, up)
    if kernels is None:
        gate, value = up.chunk(2, dim=-1)
        return F.silu(gate) * value
    return cast(Tensor, Swiglu.apply(kernels, up))  # type: ignore[no-untyped-call]


class Swiglu(torch.autograd.Function):
    """`swiglu` with the kernels ``kernels``."""

    @staticmethod
    def forward(ctx: Any, kernels: Training, up: Tensor) -> Tensor:
        up = up.detach().contiguous()
        ctx.kernels = kernels
        ctx.save_for_backward(up)
        out = up.new_empty(*up.shape[:-1], up.shape[-1] // 2)
        kernels.swiglu(up, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (up,) = ctx.saved_tensors
        grad_up = torch.empty_like(up)
        ctx.kernels.swiglu_backward(up, grads[0].contiguous(), grad_up)
        return None, grad_up
