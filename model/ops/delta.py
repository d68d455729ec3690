"""The gated delta rule, in chunk form and in step form.

    S_t = a_t S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - a_t S_{t-1}^T k_t)

Inside a block of C tokens, with b_i the sum of log a through token i, the u
solve a triangular system (Yang et al. 2024, "Parallelizing Linear Transformers
with the Delta Rule over Sequence Length", section 3.2, and "Gated Delta
Networks", section 3.3):

    u_i + beta_i sum_{j < i} e^(b_i - b_j) (k_i . k_j) u_j = beta_i (v_i - e^(b_i) S_in^T k_i)

and the rest is the recurrence with u in the place of v. The decay is one number
per head, so every exponent is taken for a pair and is never positive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.ops.products import product
from model.ops.recurrence import decayed

BLOCK = 64


def delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs T tokens of the delta rule.

    ``q``, ``k`` [B, T, H, K]; ``v`` [B, T, H, V]; ``beta``, ``log_decay``
    [B, T, H], the latter at most 0; ``state`` S [B, H, K, V]; all float32.
    Returns num [B, T, H, V] and the new S.
    """
    with torch.autocast(q.device.type, enabled=False):
        outputs = []
        # Split and not sliced: the gradient of each slice would be as large as the whole.
        parts = (t.transpose(1, 2).split(BLOCK, dim=2) for t in (q, k, v, beta, log_decay))
        for block in zip(*parts, strict=True):
            num, state = _block(state, *block)
            outputs.append(num)
        return torch.cat(outputs, dim=2).transpose(1, 2), state


def _block(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor]:
    """`delta_chunk` for one block, [B, H, C, ...]."""
    # In float64, since one strong decay leaves float32 no digits for the differences after it.
    b = log_decay.cumsum(dim=-1, dtype=torch.float64)
    pairs = (b.unsqueeze(-1) - b.unsqueeze(-2)).clamp_max(0.0).exp().to(q.dtype)  # [B, H, C, C]
    from_start, beta = b.exp().to(q.dtype).unsqueeze(-1), beta.unsqueeze(-1)
    system = (beta * pairs * (k @ k.transpose(-1, -2))).tril(-1)
    target = beta * (v - from_start * (k @ state))
    # Ones on the diagonal are implied by `unitriangular`.
    u = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    num = ((q @ k.transpose(-1, -2)) * pairs).tril() @ u + from_start * (q @ state)
    to_end = (b[..., -1:] - b).exp().to(q.dtype).unsqueeze(-1)
    state = decayed(state, b[..., -1:].unsqueeze(-1)) + (k * to_end).transpose(-1, -2) @ u
    return num, state


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of `delta_chunk`, without the axis T: num [B, H, V] and the new S."""
    state = decayed(state, log_decay[..., None, None])
    u = beta.unsqueeze(-1) * (v - product(k.unsqueeze(-2), state).squeeze(-2))
    state = torch.addcmul(state, k.unsqueeze(-1), u.unsqueeze(-2))
    return product(q.unsqueeze(-2), state).squeeze(-2), state
