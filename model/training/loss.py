"""Cross entropy of a linear head without ever holding all its logits.

The logits of a step (tokens x vocabulary, float32) are the largest tensor of a
small model's training. Here they exist for `ROWS` tokens at a time, in the
forward pass alone: it computes the gradients too, which is possible because
the loss is the last thing computed, and keeps them instead. After Wijmans et al. 2024
("Cut Your Losses"), which fuses the same in one kernel.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from model.ops.fused import Training, kernels_for

ROWS = 512
#: On a CUDA device, whose memory has room for them.
CUDA_ROWS = 16384


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        kernels: Training | None,
    ) -> Tensor:
        x_low, w_low = x.to(dtype), weight.to(dtype)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        rows = CUDA_ROWS if x.is_cuda else ROWS
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            logits = x_low[part] @ w_low.t()
            if kernels is None:
                nll, grad = _softmax_gradient(logits, targets[part])
                total += nll
            else:
                total += kernels.cross_entropy(logits, targets[part])
                grad = logits  # overwritten
            dx[part] = grad @ w_low
            dw += (grad.t() @ x_low[part]).float()  # adding two types is slower
        ctx.save_for_backward(dx, dw)
        return (total / len(x)).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        scale = grads[0] / len(dx)
        return dx * scale, dw * scale, None, None, None


def _softmax_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of -log p of ``targets`` [N], and softmax of ``logits`` [N, V] less the targets."""
    dtype, wanted = logits.dtype, targets.unsqueeze(1)
    logits = logits.float()
    logits = logits.sub_(logits.amax(dim=-1, keepdim=True))
    target_logits = logits.gather(1, wanted).squeeze(1)
    p = logits.exp_()
    sums = p.sum(dim=-1, keepdim=True)
    nll = (sums.squeeze(1).log() - target_logits).sum()
    return nll, p.div_(sums).scatter_add_(1, wanted, torch.full_like(sums, -1.0)).to(dtype)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Mean negative log likelihood in nats, a float32 scalar.

    ``x`` [N, D], ``weight`` [vocabulary, D], ``targets`` [N] int64; matrix
    products run in ``dtype``, the softmax in float32, on the CPU in a native kernel.
    """
    kernels = kernels_for(dtype, x, weight)
    loss = _LinearCrossEntropy.apply(x, weight, targets, dtype, kernels)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)
