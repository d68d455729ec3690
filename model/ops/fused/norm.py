"""RMSNorm of the residual stream, with the addition before it.

    n = s / sqrt(mean(s^2) + epsilon) * weight,   s = x  or  x + y

(Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4). The stream x
stays in float32; y, the output of a product, and n, the input of one, have its dtype.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.ops.fused.native import Training, kernels_for, product_dtype


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``x`` [..., D] and ``weight`` [D] to n [..., D], with the kernel in the products' dtype."""
    dtype = product_dtype(x)
    kernels = kernels_for(dtype, x, weight) if x.dtype == torch.float32 else None
    if kernels is None:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return cast(Tensor, Norm.apply(kernels, x, weight, epsilon, dtype))  # type: ignore[no-untyped-call]


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``x``, ``y`` [..., D] to ``x + y`` and its norm, both [..., D]."""
    fit = x.shape == y.shape and x.dtype == torch.float32 and y.dtype == product_dtype(x)
    kernels = kernels_for(y.dtype, x, y, weight) if fit else None
    if kernels is None:
        total = x + y
        return total, rms_norm(total, weight, epsilon)
    total, normed = AddNorm.apply(kernels, x, y, weight, epsilon)  # type: ignore[no-untyped-call]
    return total, normed


class RMSNorm(nn.RMSNorm):
    """torch's, by way of `rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)  # type: ignore[arg-type]


class Norm(torch.autograd.Function):
    """`rms_norm` with the kernels ``kernels``; the result has ``dtype``."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Training, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
    ) -> Tensor:
        x, weight = x.detach().contiguous(), weight.detach().contiguous()
        ctx.kernels, ctx.epsilon = kernels, epsilon
        ctx.save_for_backward(x, weight)
        out = torch.empty_like(x, dtype=dtype)
        kernels.norm(x, None, weight, epsilon, None, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        ctx.kernels.norm_backward(
            x, weight, ctx.epsilon, grads[0].contiguous(), None, grad_x, None, grad_weight
        )
        return None, grad_x, grad_weight, None, None


class AddNorm(torch.autograd.Function):
    """`add_rms_norm` with the kernels ``kernels``."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Training, x: Tensor, y: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x, y, weight = (t.detach().contiguous() for t in (x, y, weight))
        total, normed = torch.empty_like(x), torch.empty_like(y)
        kernels.norm(x, y, weight, epsilon, total, normed)
        ctx.kernels, ctx.epsilon = kernels, epsilon
        ctx.save_for_backward(total, weight)
        ctx.dtype = y.dtype
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        grad_total, grad_normed = (grad.contiguous() for grad in grads)
        grad_x, grad_y = torch.empty_like(total), torch.empty_like(total, dtype=ctx.dtype)
        grad_weight = torch.empty_like(weight)
        ctx.kernels.norm_backward(
            total, weight, ctx.epsilon, grad_normed, grad_total, grad_x, grad_y, grad_weight
        )
        return None, grad_x, grad_y, grad_weight, None
