"""DiJiang: linear attention on features in the frequency domain.

After Chen et al. 2024, "DiJiang: Efficient Large Language Models through
Compact Kernelization", section 3.

    phi(x) = softmax(w * DCT(x))                 over the features, w learned
    S_t = gamma_h S_{t-1} + phi(k_t) v_t^T,   gamma_h = 1 - 2^(-5-h)
    o_t = group_norm(phi(q_t)^T S_t) * silu(x_t W_g)

with decay, group norm and gate as in the authors' code. That code computes
(Q K^T) V and keeps a cache of keys; this is Q (K^T V) with a constant state.
State per layer: S [H, K, V].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import Losses, State
from model.attention.heads import GatedOutputAttention
from model.attention.retnet import head_log_decay
from model.attention.spec import AttentionConfig
from model.ops.recurrence import recurrence_chunk, recurrence_step


class DijiangAttention(GatedOutputAttention):
    """See the module's docstring."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.frequency_weight = nn.Parameter(
            torch.ones(config.num_attention_heads, config.head_dim)
        )

    def reset_parameters(self, generator: torch.Generator) -> None:
        super().reset_parameters(generator)
        with torch.no_grad():
            self.frequency_weight.fill_(1.0)

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        q, k, v = self._features(x)
        log_decay = self._log_decay(x.device).expand_as(q)
        num, s = recurrence_chunk(q, k, v, state["S"], log_decay, bounded=True)
        return self._gated_output(num, x), {"S": s}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        q, k, v = self._features(x)
        num, s = recurrence_step(q, k, v, state["S"], self._log_decay(x.device))
        return self._gated_output(num, x), {"S": s}

    def _features(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._heads(self.qkv(x))
        with torch.autocast(x.device.type, enabled=False):
            dct = cosine_transform(self.config.head_dim, x.device).to(q.dtype)
            q, k = ((t @ dct.t() * self.frequency_weight).softmax(dim=-1) for t in (q, k))
        return q, k, v

    def _log_decay(self, device: torch.device) -> Tensor:
        return head_log_decay(self.num_heads, device).float().unsqueeze(1)

    def _gated_norm(self, num: Tensor, gate: Tensor) -> Tensor:
        normed = F.layer_norm(num, num.shape[-1:], eps=self.config.rms_norm_eps)
        return (normed * self.norm_weight.float()).to(gate.dtype) * F.silu(gate)


def cosine_transform(size: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II as a matrix [frequency, place] in float64."""
    place = torch.arange(size, dtype=torch.float64, device=device)
    matrix = torch.cos(math.pi / size * (place + 0.5) * place.unsqueeze(1))
    matrix[0] *= math.sqrt(0.5)
    return matrix * math.sqrt(2.0 / size)
