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
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.decayed_scores import decayed_scores, sums_after
from model.ops.products import product

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
    `model.ops.decayed_scores.MIN_LOG_DECAY`, which is faster.

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
