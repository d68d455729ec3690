"""The linear-attention recurrence, in chunk form and in step form.

    S_t = diag(a_t) S_{t-1} + k_t v_t^T          S: [K, V]
    z_t = diag(a_t) z_{t-1} + k_t                z: [K]
    num_t = q_t^T S_t,  den_t = q_t^T z_t

after Katharopoulos et al. 2020 ("Transformers are RNNs", eq. 10-12; a_t = 1)
and Yang et al. 2024 ("Gated Linear Attention Transformers", eq. 3 and section
4.1; ``alpha_t`` there is ``a_t`` here). The state is updated before it is
read: a token attends to itself.

The chunk form splits T into blocks of `BLOCK` tokens. With ``b_i`` the sum of
``log a`` from the block's start through token i, token i reads

    (q_i exp(b_i)) S_in  +  sum_{j <= i} (q_i . k_j exp(b_i - b_j)) v_j

so a block costs two matrix products with S and a triangular one inside, and
memory is linear in T. The exponents are taken relative to the middle of the
block, which keeps every factor finite for ``log a >= MIN_LOG_DECAY``.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64

#: exp(-MIN_LOG_DECAY * BLOCK / 2) = e^80 still fits float32 with room for q and k.
MIN_LOG_DECAY = -2.5


def recurrence_chunk(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs T tokens of the recurrence without its denominator.

    Arguments (all float32): ``q``, ``k`` [B, T, H, K]; ``v`` [B, T, H, V];
    ``state`` S [B, H, K, V]; ``log_decay`` [B, T, H, K], each at least
    `MIN_LOG_DECAY` and at most 0, or None for no decay.

    Returns num [B, T, H, V] and the new S.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _segments(q, k, v, state, log_decay)


def _segments(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """All whole blocks at once, then the rest as one shorter block."""
    num_tokens = q.shape[1]
    whole = num_tokens - num_tokens % BLOCK
    outputs = []
    for start, stop, size in ((0, whole, BLOCK), (whole, num_tokens, num_tokens - whole)):
        if start == stop:
            continue
        decay = None if log_decay is None else log_decay[:, start:stop]
        num, state = _blocks(
            q[:, start:stop], k[:, start:stop], v[:, start:stop], state, decay, size
        )
        outputs.append(num)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), state


def normalized_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    normalizer: Tensor,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`recurrence_chunk` with its denominator: z is the S of a value that is always one.

    ``normalizer`` is z [B, H, K]. Returns num [B, T, H, V], den [B, T, H], and
    the new S and z.
    """
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    both = torch.cat([state, normalizer.unsqueeze(-1)], dim=-1)
    num, both = recurrence_chunk(q, k, v, both, log_decay)
    return num[..., :-1], num[..., -1], both[..., :-1], both[..., -1]


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """`recurrence_chunk` for T a multiple of ``size``; N = T / size blocks."""
    q, k, v = (_split(t, size) for t in (q, k, v))  # [B, H, N, C, K or V]
    if log_decay is None:
        scores = (q @ k.transpose(-1, -2)).tril()  # [B, H, N, C, C]
        before, state = _scan(state, k.transpose(-1, -2) @ v, None)
        return _join(scores @ v + q @ before), state
    b = _split(log_decay, size).cumsum(dim=-2)
    middle, last = b[..., size // 2, :].unsqueeze(-2), b[..., -1:, :]
    scores = ((q * (b - middle).exp()) @ (k * (middle - b).exp()).transpose(-1, -2)).tril()
    added = (k * (last - b).exp()).transpose(-1, -2) @ v  # [B, H, N, K, V]
    before, state = _scan(state, added, last.transpose(-1, -2).exp())
    return _join(scores @ v + (q * b.exp()) @ before), state


def _scan(state: Tensor, added: Tensor, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before each block, [B, H, N, K, V], and the one after the last."""
    before: list[Tensor] = []
    for n in range(added.shape[2]):
        before.append(state)
        state = (state if carry is None else carry[:, :, n] * state) + added[:, :, n]
    return torch.stack(before, dim=2), state


def _split(x: Tensor, size: int) -> Tensor:
    """[B, T, H, F] to [B, H, N, C, F]."""
    blocks: Tensor = x.unflatten(1, (-1, size))
    return blocks.permute(0, 3, 1, 2, 4)


def _join(x: Tensor) -> Tensor:
    """[B, H, N, C, F] to [B, T, H, F]."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)


def recurrence_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence.

    ``q``, ``k`` [B, H, K]; ``v`` [B, H, V]; ``state`` [B, H, K, V]; ``decay``
    a (not its logarithm) [B, H, K] or None. Returns num [B, H, V] and the new S.
    """
    if decay is not None:
        state = state * decay.unsqueeze(-1)
    state = torch.addcmul(state, k.unsqueeze(-1), v.unsqueeze(-2))
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def normalized_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    normalizer: Tensor,
    decay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`recurrence_step` with z [B, H, K]; num [B, H, V], den [B, H], and the new S and z."""
    num, state = recurrence_step(q, k, v, state, decay)
    normalizer = k + (normalizer if decay is None else normalizer * decay)
    return num, (q * normalizer).sum(dim=-1), state, normalizer
