"""The gated delta rule, in chunk form and in step form.

    S_t = a_t S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - a_t S_{t-1}^T k_t)

Inside a block of C tokens, with b_i the sum of log a through token i, the u
solve a triangular system (Yang et al. 2024, "Parallelizing Linear Transformers
with the Delta Rule over Sequence Length", section 3.2, and "Gated Delta
Networks", section 3.3):

    u_i + beta_i sum_{j < i} e^(b_i - b_j) (k_i . k_j) u_j = beta_i (v_i - e^(b_i) S_in^T k_i)

With A the matrix of that system this is u = U - W S_in, where U = A^-1 beta v and
W = A^-1 beta e^b k do not depend on the state: they are computed for all blocks at
once. The rest is the recurrence with u in the place of v. Where the decay is one number
per head, every exponent is taken for a pair and is never positive. With one per key channel,
diag(a_t) in the place of a_t (Kimi Team 2025, "Kimi Linear", eq. 1), the products of a pair
are `model.ops.recurrence`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.layers import product
from model.ops.recurrence import decayed, decayed_scores, sums_after

BLOCK = 64


def delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs T tokens of the delta rule.

    ``q``, ``k`` [B, T, H, K]; ``v`` [B, T, H, V]; ``beta``, ``log_decay``
    [B, T, H], the latter at most 0; ``state`` S [B, H, K, V]; all float32.
    ``log_decay`` may also be [B, T, H, K], at least `MIN_LOG_DECAY` of `decayed_scores`.
    Returns num [B, T, H, V] and the new S. Under autocast the operands of products are
    rounded to its dtype; decays, the inverse and the state stay in float32.
    """
    device = q.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
    num_tokens = q.shape[1]
    block = min(BLOCK, num_tokens)
    if log_decay.dim() == k.dim():  # a power of two for the products of pairs
        block = min(BLOCK, max(4, 1 << (num_tokens - 1).bit_length()))
    with torch.autocast(device, enabled=False):
        q, k, v, beta, log_decay = (_split(t, block) for t in (q, k, v, beta, log_decay))
        num, state = _blocks(q, k, v, beta, log_decay, state, low)
        return num.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :num_tokens], state


def _blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    state: Tensor,
    low: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`delta_chunk` for N blocks, [B, H, N, C, ...], with products of ``low`` operands."""
    by_pair = _by_pair_per_channel if log_decay.dim() == k.dim() else _by_pair
    keys, scores, from_start, to_end, whole = by_pair(q, k, log_decay, low)
    beta = beta.unsqueeze(-1)
    system = (beta * keys).tril(-1)
    inverse = _UnitInverse.apply(system, low).to(low)  # type: ignore[no-untyped-call]
    u_part = (inverse @ (beta * v).to(low)).to(q.dtype)
    w = inverse @ (beta * from_start * k).to(low)
    scores = scores.tril().to(low)
    reads = (q * from_start).to(low)
    writes = (k * to_end).to(low).transpose(-1, -2)
    nums, us = [], []
    # Not indexed: the gradient of each index would be as large as all blocks together.
    blocks = (t.unbind(dim=2) for t in (u_part, w, reads, writes, whole))
    for u_part_n, w_n, reads_n, writes_n, decay_n in zip(*blocks, strict=True):
        before = state.to(low)
        u = (u_part_n - (w_n @ before).to(q.dtype)).to(low)
        nums.append(reads_n @ before)
        us.append(u)
        state = decayed(state, decay_n) + (writes_n @ u).to(q.dtype)
    return (scores @ torch.stack(us, dim=2) + torch.stack(nums, dim=2)).to(q.dtype), state


def _by_pair(q: Tensor, k: Tensor, log_decay: Tensor, low: torch.dtype) -> tuple[Tensor, ...]:
    """Of each pair of a block, e^(b_i - b_j) times k_i . k_j and times q_i . k_j, for j <= i.

    Then the decays from the block's start through each token and after it to the end, and the
    logarithm of that of the whole block, as they are multiplied with k and with the state.
    """
    # In float64, since one strong decay leaves float32 no digits for the differences after it.
    b = log_decay.cumsum(dim=-1, dtype=torch.float64)
    pairs = (b.unsqueeze(-1) - b.unsqueeze(-2)).to(q.dtype).clamp_max(0.0).exp()  # [B,H,N,C,C]
    from_start = b.exp().to(q.dtype).unsqueeze(-1)
    to_end = (b[..., -1:] - b).exp().to(q.dtype).unsqueeze(-1)
    keys_t = k.to(low).transpose(-1, -2)
    keys, scores = (pairs * (t.to(low) @ keys_t).to(q.dtype) for t in (k, q))
    return keys, scores, from_start, to_end, b[..., -1:].unsqueeze(-1)


def _by_pair_per_channel(
    q: Tensor, k: Tensor, log_decay: Tensor, low: torch.dtype
) -> tuple[Tensor, ...]:
    """`_by_pair` for a decay per channel, [B, H, N, C, K], in float32."""
    keys, scores = (decayed_scores(t, k, log_decay, bounded=True) for t in (k, q))
    whole = log_decay.sum(dim=-2).unsqueeze(-1)
    return keys, scores, log_decay.cumsum(dim=-2).exp(), sums_after(log_decay).exp(), whole


def _split(x: Tensor, block: int) -> Tensor:
    """[B, T, H, ...] to [B, H, N, C, ...], the last block filled up with zeros.

    A token of zeros changes no state.
    """
    missing = -x.shape[1] % block
    if missing:
        x = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, missing))
    blocks: Tensor = x.unflatten(1, (-1, block)).movedim(3, 1)
    return blocks.contiguous()


class _UnitInverse(torch.autograd.Function):
    """The inverse of I + A for A [..., C, C] with zeros on and above the diagonal."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, low: torch.dtype) -> Tensor:
        # Ones on the diagonal are implied by `unitriangular`.
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
        inverse: Tensor = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse.to(low))
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        transposed: Tensor = ctx.saved_tensors[0].transpose(-1, -2)
        grad: Tensor = transposed @ grads[0].to(transposed.dtype) @ transposed
        return grad.to(grads[0].dtype).neg_(), None


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of `delta_chunk`, without the axis T: num [B, H, V] and the new S."""
    per_channel = log_decay if log_decay.dim() == k.dim() else log_decay.unsqueeze(-1)
    state = decayed(state, per_channel.unsqueeze(-1))
    u = beta.unsqueeze(-1) * (v - product(k.unsqueeze(-2), state).squeeze(-2))
    state = torch.addcmul(state, k.unsqueeze(-1), u.unsqueeze(-2))
    return product(q.unsqueeze(-2), state).squeeze(-2), state
