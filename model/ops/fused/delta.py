"""The chunk form of the delta rule on q, k and v as one product leaves them.

The kernel goes through a head's blocks one after the other with all of a block in the
nearest cache; the symbols and equations are those of `model.ops.delta`. For the gradient
it keeps u and the state before each block and computes the rest again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.ops.delta import BLOCK, delta_chunk
from model.ops.fused.native import Training, kernels_for


def packed_delta_chunk(
    qkv: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`model.ops.delta.delta_chunk` for ``qkv`` [B, T, H (2 K + V)]: q, then k, then v, by head.

    ``beta``, ``log_decay`` [B, T, H] and ``state`` [B, H, K, V] are float32. Returns num
    [B, T, H, V] and the new S in float32; with the kernel num has the dtype of ``qkv``. There is
    none for a decay per channel, [B, T, H, K].
    """
    per_head = log_decay.dim() == beta.dim()
    kernels = kernels_for(qkv.dtype, qkv, beta, log_decay, state) if per_head else None
    if kernels is None:
        _, heads, key, value = state.shape
        q, k, v = qkv.to(state.dtype).split([heads * key, heads * key, heads * value], dim=-1)
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        return delta_chunk(q, k, v, beta, log_decay, state)
    num, new_state = Delta.apply(kernels, qkv, beta, log_decay, state)  # type: ignore[no-untyped-call]
    return num, new_state


class Delta(torch.autograd.Function):
    """`packed_delta_chunk` with the kernels ``kernels``."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Training, qkv: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        qkv, beta, log_decay, state = inputs = [
            t.detach().contiguous() for t in (qkv, beta, log_decay, state)
        ]
        batch, heads, key, value = state.shape
        num_tokens = qkv.shape[1]
        num = qkv.new_empty(batch, num_tokens, heads, value)
        u = qkv.new_empty(batch, heads, num_tokens, value)
        starts = state.new_empty(batch, heads, -(-num_tokens // BLOCK), key, value)
        new_state = torch.empty_like(state)
        kernels.delta(qkv, beta, log_decay, state, num, u, starts, new_state)
        ctx.kernels = kernels
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, u, starts)
        return num, new_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, u, starts = ctx.saved_tensors
        grad_num, grad_state = grads
        if grad_num is None:
            batch, heads, num_tokens, value = u.shape
            grad_num = u.new_zeros(batch, num_tokens, heads, value)
        if grad_state is not None:
            grad_state = grad_state.contiguous()
        results = [torch.empty_like(t) for t in inputs]
        ctx.kernels.delta_backward(*inputs, u, starts, grad_num.contiguous(), grad_state, *results)
        return None, *results
