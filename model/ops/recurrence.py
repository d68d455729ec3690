"""The linear-attention recurrence, in chunk form and in step form.

    S_t = diag(a_t) S_{t-1} + k_t v_t^T          S: [K, V]
    num_t = q_t^T S_t

after Katharopoulos et al. 2020 ("Transformers are RNNs", eq. 10-12; a_t = 1)
and Yang et al. 2024 ("Gated Linear Attention Transformers", eq. 3 and section
4.1; ``alpha_t`` there is ``a_t`` here). The state is updated before it is
read: a token attends to itself.

The chunk form splits T into blocks of `BLOCK` tokens. With ``b_i`` the sum of
``log a`` from the block's start through token i, token i reads

    (q_i exp(b_i)) S_in  +  sum_{j <= i} (q_i . k_j exp(b_i - b_j)) v_j

so a block costs two matrix products with S and a triangular one inside
(`decayed_scores`), and memory is linear in T.

S may be float64 with float32 inputs, and is where nothing decays: a float32
sum stops taking in new tokens after 2^24 of them. Only the sum over blocks is
then done in float64; inside a block nothing changes.

The scores of a block under a decay per channel, for decays of any strength (`decayed_scores`):

    s_ij = sum_f q_if k_jf exp(sum_{j < t <= i} log a_tf)   for j <= i, else 0

The exponent of a pair is never positive, but those of its two factors are
unless they are taken relative to a point between i and j. So a block is halved
again and again: for queries in a second half and keys in the first half the
reference is the first half's last token, and both factors are at most one.
That is exact for any decay (what underflows is zero in the result too, and no
large sum is ever subtracted from another), and causal to the bit: the reference
of a pair is never later than its query.

The smallest blocks, `EXACT_BASE` tokens, are summed pair by pair. Where the
caller knows that ``log a >= MIN_LOG_DECAY``, they have `BOUNDED_BASE` tokens
and one matrix product with their first token as the reference, which is faster.

After the secondary chunking of Yang et al. 2024 ("Gated Linear Attention
Transformers", section 4.3), carried on to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from model.ops.layers import product

BLOCK = 64


def recurrence_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    bounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Runs T tokens of the recurrence.

    ``q``, ``k`` [B, T, H, K] and ``v`` [B, T, H, V], float32; ``state`` S
    [B, H, K, V], float32 or float64; ``log_decay`` [B, T, H, K], at most 0, or
    None for no decay. ``bounded`` promises that it is also at least
    `model.ops.recurrence.MIN_LOG_DECAY`, which is faster.

    Returns num [B, T, H, V] and the new S in the dtype of the old one.
    """
    with torch.autocast(q.device.type, enabled=False):
        num_tokens = q.shape[1]
        whole = num_tokens - num_tokens % BLOCK
        outputs = []
        for part, size in ((slice(0, whole), BLOCK), (slice(whole, None), num_tokens - whole)):
            if q[:, part].shape[1]:
                decay = None if log_decay is None else log_decay[:, part]
                num, state = _blocks(
                    q[:, part], k[:, part], v[:, part], state, decay, bounded, size
                )
                outputs.append(num)
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), state


def _blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    bounded: bool,
    size: int,
) -> tuple[Tensor, Tensor]:
    """`recurrence_chunk` for T a multiple of ``size``; N = T / size blocks."""
    if log_decay is None:
        q, k, v = (_split(t, size) for t in (q, k, v))  # [B, H, N, C, K or V]
        scores = (q @ k.transpose(-1, -2)).tril()  # [B, H, N, C, C]
        before, state = _scan(state, k.transpose(-1, -2) @ v, None)
        return _join(scores @ v + q @ before.to(q.dtype)), state
    num_tokens, padded = q.shape[1], max(4, 1 << (size - 1).bit_length())
    if padded != size:  # only the last, shorter block; tokens of zeros change no state
        q, k, v, log_decay = (
            F.pad(t, (0, 0, 0, 0, 0, padded - size)) for t in (q, k, v, log_decay)
        )
    q, k, v = (_split(t, padded) for t in (q, k, v))
    log_decay = _split(log_decay, padded)
    scores = decayed_scores(q, k, log_decay, bounded)
    added = (k * sums_after(log_decay).exp()).transpose(-1, -2) @ v  # [B, H, N, K, V]
    before, state = _scan(state, added, log_decay.sum(dim=-2, dtype=state.dtype).unsqueeze(-1))
    b = log_decay.cumsum(dim=-2)
    return _join(scores @ v + (q * b.exp()) @ before.to(q.dtype))[:, :num_tokens], state


def _scan(state: Tensor, added: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before each block, [B, H, N, K, V], and the one after the last.

    ``log_decay`` [B, H, N, K, 1] is that of whole blocks, in the state's dtype.
    """
    before: list[Tensor] = []
    # Not indexed: the gradient of each index would be as large as all blocks together.
    decays = [None] * added.shape[2] if log_decay is None else log_decay.unbind(dim=2)
    for added_n, decay_n in zip(added.unbind(dim=2), decays, strict=True):
        before.append(state)
        state = (state if decay_n is None else decayed(state, decay_n)) + added_n
    return torch.stack(before, dim=2), state


def _split(x: Tensor, size: int) -> Tensor:
    """[B, T, H, F] to [B, H, N, C, F]."""
    blocks: Tensor = x.unflatten(1, (-1, size))
    return blocks.permute(0, 3, 1, 2, 4)


def _join(x: Tensor) -> Tensor:
    """[B, H, N, C, F] to [B, T, H, F]."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)


def recurrence_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence.

    ``q``, ``k`` [B, H, K]; ``v`` [B, H, V]; ``state`` [B, H, K, V];
    ``log_decay`` [B, H, K] or None. Returns num [B, H, V] and the new S.
    """
    if log_decay is not None:
        state = decayed(state, log_decay.unsqueeze(-1))
    k, v = k.to(state.dtype), v.to(state.dtype)
    state = torch.addcmul(state, k.unsqueeze(-1), v.unsqueeze(-2))
    num = product(q.to(state.dtype).unsqueeze(-2), state)
    return num.squeeze(-2).to(q.dtype), state


def decayed(state: Tensor, log_decay: Tensor) -> Tensor:
    """``state exp(log_decay)`` as ``state + state expm1(log_decay)``.

    A decay near one, rounded to float32, is wrong in the same direction at each step.
    """
    return torch.addcmul(state, state, log_decay.to(state.dtype).expm1())


def normalizer_chunk(q: Tensor, k: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The denominator ``q_t^T z_t`` with ``z_t = z_{t-1} + k_t``, without decay.

    ``q``, ``k`` [B, T, H, K]; ``state`` z [B, H, K]. Returns den [B, T, H] and the new z.
    """
    sums = state.unsqueeze(1) + k.cumsum(dim=1, dtype=state.dtype)
    return (q * sums.to(q.dtype)).sum(dim=-1), sums[:, -1]


def normalizer_step(q: Tensor, k: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`normalizer_chunk` for one token: ``q``, ``k`` [B, H, K] to den [B, H] and the new z."""
    state = state + k
    return (q * state.to(q.dtype)).sum(dim=-1), state


EXACT_BASE, BOUNDED_BASE = 4, 16

#: exp(-MIN_LOG_DECAY * (BOUNDED_BASE - 1)) = e^75 fits float32 with room for q and k.
MIN_LOG_DECAY = -5.0


def decayed_scores(q: Tensor, k: Tensor, log_decay: Tensor, bounded: bool) -> Tensor:
    """``q``, ``k``, ``log_decay`` [..., C, F] to scores [..., C, C]; C is 4, 8, 16 ...

    ``bounded`` promises that no log decay is below `MIN_LOG_DECAY`.
    """
    base = min(q.shape[-2], BOUNDED_BASE if bounded else EXACT_BASE)
    return _DecayedScores.apply(q, k, log_decay, base, bounded)  # type: ignore[no-any-return,no-untyped-call]


class _DecayedScores(torch.autograd.Function):
    """The gradient has the structure of the scores; autograd's own would keep every level."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, log_a: Tensor, base: int, bounded: bool) -> Tensor:
        ctx.save_for_backward(q, k, log_a)
        ctx.base, ctx.bounded = base, bounded
        scores = q.new_zeros(*q.shape[:-1], q.shape[-2])
        for half in _levels(q.shape[-2], base):
            (_, q2), (k1, _), (log_a1, log_a2) = (_halves(t, half) for t in (q, k, log_a))
            left, right = q2 * log_a2.cumsum(dim=-2).exp_(), k1 * sums_after(log_a1).exp_()
            _crossing(scores, half).copy_(left @ right.transpose(-1, -2))
        q, k, log_a = (t.unflatten(-2, (-1, base)) for t in (q, k, log_a))
        if bounded:
            from_start = log_a.cumsum(dim=-2)
            within = (q * from_start.exp()) @ (k * (-from_start).exp_()).transpose(-1, -2)
        else:
            pairs = _pair_decay(log_a).mul_(q.unsqueeze(-2)).mul_(k.unsqueeze(-3))
            within = pairs.sum(dim=-1)
        _diagonal(scores, base).copy_(within.tril_())
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        q, k, log_a = ctx.saved_tensors  # type: ignore[attr-defined]
        base, bounded = ctx.base, ctx.bounded  # type: ignore[attr-defined]
        grad_q = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        grad_k = torch.zeros_like(grad_q)
        for half in _levels(q.shape[-2], base):
            (_, q2), (k1, _), (log_a1, log_a2) = (_halves(t, half) for t in (q, k, log_a))
            decay_q, decay_k = log_a2.cumsum(dim=-2).exp_(), sums_after(log_a1).exp_()
            g = _crossing(grad, half)
            _halves(grad_q, half)[1].add_((g @ (k1 * decay_k)).mul_(decay_q))
            _halves(grad_k, half)[0].add_((g.transpose(-1, -2) @ (q2 * decay_q)).mul_(decay_k))
        g = _diagonal(grad, base).tril()
        part_q, part_k = (t.unflatten(-2, (-1, base)) for t in (grad_q, grad_k))
        q4, k4, log_a4 = (t.unflatten(-2, (-1, base)) for t in (q, k, log_a))
        if bounded:
            from_start = log_a4.cumsum(dim=-2)
            decay_q, decay_k = from_start.exp(), (-from_start).exp_()
            part_q.add_((g @ (k4 * decay_k)).mul_(decay_q))
            part_k.add_((g.transpose(-1, -2) @ (q4 * decay_q)).mul_(decay_k))
        else:
            pairs = _pair_decay(log_a4).mul_(g.unsqueeze(-1))
            part_q.add_((pairs * k4.unsqueeze(-3)).sum(dim=-2))
            part_k.add_(pairs.mul_(q4.unsqueeze(-2)).sum(dim=-3))
        if not ctx.needs_input_grad[2]:  # type: ignore[attr-defined]
            return grad_q, grad_k, None, None, None
        # Of the cumulative sum b first, as s_ij depends on b_i - b_j alone.
        grad_b = q * grad_q - k * grad_k
        return grad_q, grad_k, grad_b + sums_after(grad_b), None, None


def _levels(size: int, base: int) -> Iterator[int]:
    """The lengths of the halves, from large to small."""
    while size > base:
        size //= 2
        yield size


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """[..., C, F] to first and second halves, [..., C / (2 half), half, F] each, as views."""
    pairs = x.unflatten(-2, (-1, 2, half))
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def _diagonal(scores: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal of [..., C, C] as a view [..., C / size, size, size]."""
    num = scores.shape[-1] // size
    blocks = scores.unflatten(-1, (num, size)).unflatten(-3, (num, size))
    diagonal: Tensor = blocks.diagonal(dim1=-4, dim2=-2)
    return diagonal.movedim(-1, -3)


def _crossing(scores: Tensor, half: int) -> Tensor:
    """The pairs with the query in a second half and the key in the first half before it."""
    return _diagonal(scores, 2 * half)[..., half:, :half]


def sums_after(x: Tensor) -> Tensor:
    """The sum of all later tokens, [..., C, F] to [..., C, F]."""
    backwards = torch.flip(F.pad(x[..., 1:, :], (0, 0, 0, 1)), (-2,))
    return torch.flip(backwards.cumsum(dim=-2), (-2,))


def _pair_decay(log_a: Tensor) -> Tensor:
    """[..., C, F] to the decay from j to i, [..., C, C, F]; one where j >= i."""
    token = torch.arange(log_a.shape[-2], device=log_a.device)
    i, j = token[:, None, None], token[:, None]
    between = ((j < token) & (token <= i)).to(log_a.dtype)  # [C, C, C]
    exponent: Tensor = (between.flatten(0, 1) @ log_a).unflatten(-2, (len(token), len(token)))
    return exponent.exp_()
