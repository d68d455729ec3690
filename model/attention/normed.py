"""Linear attention without a denominator: the output is normed per head instead.

    S_t = S_{t-1} + phi_k(k_t) v_t^T                      S: [H, K, V], float64
    o_t = rms_norm(K^-1/2 phi_q(q_t)^T S_t) * norm_weight

The norm takes the place of the sum of the weights (Qin et al. 2022, "The Devil
in Linear Transformer", eq. 9), so features may be negative. This is what
flash-linear-attention calls ``linear_attn``, whose checkpoints it is here for.

``map`` "product" has two learned affine maps for q and two for k, shared by the
heads: phi(x) = (A x + a) * (B x + b), elementwise. "elu" is elu(x) + 1, "relu"
and "identity" are what they say.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import HeadsAttention, Losses, State
from model.attention.specs import AttentionConfig
from model.ops.recurrence import recurrence_chunk, recurrence_step


class NormedAttention(HeadsAttention):
    """See the module's docstring. Options: ``map``, ``key_dim`` (0: as wide as a value)."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.map = self.options["map"]
        if self.map == "product":
            self.q_map = AffineProduct(self.key_width)
            self.k_map = AffineProduct(self.key_width)

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        q, k, v, conv = self._features(x, state)
        num, s = recurrence_chunk(q, k, v, state["S"])
        return self._merge(num, x), {"S": s, **conv}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        q, k, v, conv = self._features(x, state)
        num, s = recurrence_step(q, k, v, state["S"])
        return self._merge(num, x), {"S": s, **conv}

    def _features(self, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor, State]:
        q, k, v, conv = self._convolved(x, state)
        if self.map == "product":
            q, k = self.q_map(q), self.k_map(k)
        elif self.map == "elu":
            q, k = F.elu(q) + 1.0, F.elu(k) + 1.0
        elif self.map == "relu":
            q, k = F.relu(q), F.relu(k)
        return q * self.key_width**-0.5, k, v, conv


class AffineProduct(nn.Module):
    """``(A x + a) * (B x + b)`` in float32, with both maps in one matrix."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.both = nn.Linear(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            a, b = F.linear(x, self.both.weight.float(), self.both.bias.float()).chunk(2, dim=-1)
        return a * b
