"""The recurrence of RWKV-7's time mix, token by token and in blocks of tokens.

    S_t = diag(w_t) S_{t-1} - d_t u_t^T + k_t v_t^T,   u_t = S_{t-1}^T c_t,   y_t = S_t^T r_t

for each head, with S [key, value] and w = exp(log_w). This is equation 15 of arXiv
2503.14456 transposed, with c the normalised removal key (kappa hat) and d = c * a, a the
in-context learning rate. ``c`` reads the state before it decays.

Inside a block of C tokens let b_t be the sum of log_w through token t. Then

    u_t = (c_t e^(b_{t-1}))^T S_in + sum_{j < t} (c_t e^(b_{t-1} - b_j)) . (k_j v_j^T - d_j u_j^T)

is a triangular system for U [C, value], and outputs and the new state are sums of the same
kind. A product of e^b_t and e^-b_j takes the place of the difference: log_w is above
-e^-0.5, so over 16 tokens e^-b stays below 1.7e4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.products import product

BLOCK = 16


class Inputs(NamedTuple):
    """What each token brings, [..., H, N] float32 each, by the module's names."""

    r: Tensor
    log_w: Tensor
    k: Tensor
    v: Tensor
    c: Tensor
    d: Tensor


#: Either form below: inputs and S to outputs and the new S.
Recurrence = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]


def step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token, inputs [B, H, N], ``state`` S [B, H, N, N]; y [B, H, N] and the new S."""
    u = product(inputs.c.unsqueeze(-2), state)  # [B, H, 1, N]
    state = state * inputs.log_w.exp().unsqueeze(-1)
    state = torch.addcmul(state, inputs.d.unsqueeze(-1), u, value=-1)
    state = torch.addcmul(state, inputs.k.unsqueeze(-1), inputs.v.unsqueeze(-2))
    return product(inputs.r.unsqueeze(-2), state).squeeze(-2), state


def chunk(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """T tokens, inputs [B, T, H, N], ``state`` S [B, H, N, N]; y [B, T, H, N] and the new S.

    In float32 under autocast too.
    """
    with torch.autocast(state.device.type, enabled=False):
        return _chunk(inputs, state)


def _chunk(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens = inputs.r.shape[1]
    r, log_w, k, v, c, d = (_blocks(tensor) for tensor in inputs)
    b = log_w.cumsum(dim=-2)
    end = b[..., -1:, :]
    r, c = r * b.exp(), c * (b - log_w).exp()
    k_in, d_in = (k * (-b).exp()).transpose(-1, -2), (d * (-b).exp()).transpose(-1, -2)
    k_out, d_out = (k * (end - b).exp()).transpose(-1, -2), (d * (end - b).exp()).transpose(-1, -2)
    # U = from_state S_in + from_values
    system = (c @ d_in).tril(-1)  # ones on the diagonal are implied by `unitriangular`
    right = torch.cat([c, (c @ k_in).tril(-1) @ v], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_state, from_values = solved.chunk(2, dim=-1)
    values, removed = (r @ k_in).tril() @ v, (r @ d_in).tril()
    written, decay = k_out @ v, end.exp().transpose(-1, -2)
    # `unbind`, because the gradient of an index is as large as what is indexed.
    blocks = (from_state, from_values, r, values, removed, decay, written, d_out)
    outputs = []
    for u_s, u_v, r_n, y_v, y_u, w_n, s_v, s_u in zip(
        *(tensor.unbind(2) for tensor in blocks), strict=True
    ):
        u = u_s @ state + u_v
        outputs.append(r_n @ state + y_v - y_u @ u)
        state = w_n * state + s_v - s_u @ u
    y = torch.stack(outputs, dim=2).flatten(2, 3).transpose(1, 2)
    return y[:, :num_tokens], state


def _blocks(x: Tensor) -> Tensor:
    """[B, T, H, N] to [B, H, blocks, C, N]; what is missing at the end is zeros."""
    missing = -x.shape[1] % BLOCK
    x = F.pad(x, (0, 0, 0, 0, 0, missing)).transpose(1, 2)
    blocks: Tensor = x.unflatten(2, (-1, BLOCK))
    return blocks.contiguous()
