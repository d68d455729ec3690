"""RetNet's retention (Sun et al. 2023, "Retentive Network", section 2.1-2.2).

    S_t = diag(a) S_{t-1} + (R_t k_t) v_t^T,   a_f = gamma_h zeta_f^(1/512)
    o_t = rms_norm(K^-1/2 (R_t q_t)^T S_t) * silu(x_t W_g),   gamma_h = 1 - 2^(-5-h)

R_t rotates by t (`model.ops.layers`). xPos (Sun et al. 2022, "A Length-
Extrapolatable Transformer", eq. 12) scales q by zeta^(t/512) and k by
zeta^(-t/512), with zeta_i = (2 i / K + 0.4) / 1.4 for the i-th pair; the second
grows without bound. Only their product acts, and that is one more decay per
channel: so it is applied here, and the stream has no end.

Option ``positions``: "xpos", "rotary" (as in the authors' code, which leaves
zeta out) or "none". State per layer: S [H, K, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.attention.base import HeadsAttention, Losses, State, token_positions
from model.ops.layers import rotate
from model.ops.recurrence import recurrence_chunk, recurrence_step

XPOS_OFFSET, XPOS_SCALE_BASE = 0.4, 512.0


class RetnetAttention(HeadsAttention):
    """See the module's docstring. Options: ``positions``, ``key_dim`` (0 for ``head_dim``)."""

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        q, k, v, conv = self._rotated(x, state, token_positions(position, x.shape[1]))
        log_decay = self._log_decay(x.device).expand_as(q)
        num, s = recurrence_chunk(q, k, v, state["S"], log_decay, bounded=True)
        return self._merge(num, x), {"S": s, **conv}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        q, k, v, conv = self._rotated(x, state, position)
        num, s = recurrence_step(q, k, v, state["S"], self._log_decay(x.device))
        return self._merge(num, x), {"S": s, **conv}

    def _rotated(
        self, x: Tensor, state: State, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        q, k, v, conv = self._convolved(x, state)
        if self.options["positions"] != "none":
            q, k = rotate(q, positions), rotate(k, positions)
        return q * self.key_width**-0.5, k, v, conv

    def _log_decay(self, device: torch.device) -> Tensor:
        """[H, K]: of the head, and of xPos for each pair of channels."""
        decay = head_log_decay(self.num_heads, device).unsqueeze(1)
        if self.options["positions"] != "xpos":
            return decay.expand(-1, self.key_width).float()
        half = self.key_width // 2
        pair = torch.arange(half, dtype=torch.float64, device=device)
        zeta = (pair / half + XPOS_OFFSET) / (1 + XPOS_OFFSET)
        return (decay + zeta.log().repeat(2) / XPOS_SCALE_BASE).float()


def head_log_decay(num_heads: int, device: torch.device) -> Tensor:
    """The heads' log gamma_h = log(1 - 2^(-5-h)), [H] float64 (Retentive Network, eq. 8)."""
    head = torch.arange(num_heads, dtype=torch.float64, device=device)
    return torch.log1p(-(2.0 ** (-5.0 - head)))
