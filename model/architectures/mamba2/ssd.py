"""The recurrence of Mamba-2, token by token and in blocks of tokens.

    S_t = exp(l_t) S_{t-1} + B_t x_t^T,   y_t = S_t^T C_t

for each head, with S [N, P], x_t already times its step size Delta_t, and l_t = Delta_t A the log
of a decay that all numbers of a head share. B and C are shared by the heads of a group. This is
equation 16 of Dao and Gu 2024 ("Transformers are SSMs", arXiv 2405.21060) with S transposed.

Blocks are their algorithm of section 6. With b_i the sum of l from the block's start through
token i, token i reads

    exp(b_i) S_in^T C_i  +  sum_{j <= i} (C_i . B_j) exp(b_i - b_j) x_j

so a block costs two products with S and a masked one inside. The sums b are float64: their
differences are then exact to float32 for decays of any strength.

H heads in G groups, R = H / G heads of each; M blocks of K tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.products import product
from model.ops.recurrence import decayed

BLOCK = 64


def step(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: ``x`` [B, H, P], ``log_decay`` [B, H], ``b``, ``c`` [B, G, N]; all float32.

    ``state`` S [B, H, N, P]. Returns y [B, H, P] and the new S.
    """
    each = x.shape[1] // b.shape[1]
    b, c = (t.repeat_interleave(each, dim=1) for t in (b, c))
    state = decayed(state, log_decay[..., None, None])
    state = torch.addcmul(state, b.unsqueeze(-1), x.unsqueeze(-2))
    return product(c.unsqueeze(-2), state).squeeze(-2), state


def chunk(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """T tokens: ``x`` [B, T, H, P], ``log_decay`` [B, T, H], ``b``, ``c`` [B, T, G, N].

    ``state`` S [B, H, N, P]. Returns y [B, T, H, P] and the new S. In float32 under autocast too.
    """
    with torch.autocast(state.device.type, enabled=False):
        return _chunk(x, log_decay, b, c, state)


def _chunk(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    num_tokens, groups = x.shape[1], b.shape[2]
    heads = (groups, x.shape[2] // groups)
    x = _blocks(x.unflatten(2, heads))  # [B, G, M, K, R, P]
    log_decay = _blocks(log_decay.unflatten(2, heads)).movedim(-1, -2)  # [B, G, M, R, K]
    b, c = _blocks(b), _blocks(c)  # [B, G, M, K, N]
    sums = log_decay.cumsum(dim=-1, dtype=torch.float64)
    inside = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(x.dtype)  # [B, G, M, R, K, K]
    later = torch.ones(inside.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    scores = (c @ b.mT).unsqueeze(3) * inside.masked_fill(later, -torch.inf).exp()
    y = (scores @ x.transpose(3, 4)).transpose(3, 4)
    end = sums[..., -1:]
    written = x * (end - sums).to(x.dtype).exp().mT.unsqueeze(-1)
    added = b.mT @ written.flatten(-2)  # [B, G, M, N, R P]
    state = state.unflatten(1, heads).movedim(2, 3).flatten(-2)  # [B, G, N, R P]
    before, state = _scan(state, added, end.to(x.dtype), x.shape[-1])
    from_state = (c @ before).unflatten(-1, x.shape[-2:])
    y = y + from_state * sums.to(x.dtype).exp().mT.unsqueeze(-1)
    state = state.unflatten(-1, x.shape[-2:]).movedim(3, 2).flatten(1, 2)
    return y.movedim(1, 3).flatten(1, 2)[:, :num_tokens].flatten(2, 3), state


def _scan(state: Tensor, added: Tensor, log_decay: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The states before each block, [B, G, M, N, R P], and the one after the last.

    ``log_decay`` [B, G, M, R, 1] is that of whole blocks, ``width`` P.
    """
    log_decay = log_decay.mT.repeat_interleave(width, dim=-1)  # [B, G, M, 1, R P]
    before = []
    # Not indexed: the gradient of each index would be as large as all blocks together.
    for added_m, decay_m in zip(added.unbind(2), log_decay.unbind(2), strict=True):
        before.append(state)
        state = decayed(state, decay_m) + added_m
    return torch.stack(before, dim=2), state


def _blocks(x: Tensor) -> Tensor:
    """[B, T, G, ...] to [B, G, M, K, ...]; tokens of zeros at the end change no state."""
    size = min(BLOCK, x.shape[1])
    missing = -x.shape[1] % size
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    blocks: Tensor = x.unflatten(1, (-1, size))
    return blocks.movedim(3, 1)
