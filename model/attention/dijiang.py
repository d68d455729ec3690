"""DiJiang: linear attention on features in the frequency domain.

After Chen et al. 2024, "DiJiang: Efficient Large Language Models through
Compact Kernelization", section 3.

    phi(x) = softmax(w * DCT(x))                 over the features, w learned
    S_t = gamma_h S_{t-1} + phi(k_t) v_t^T,   gamma_h = 1 - 2^(-5-h)
    o_t = group_norm(phi(q_t)^T S_t) * silu(x_t W_g)

Option ``published`` has the map and the decay of the authors' code: q and k are rotated first, the
transform is the inverse one, w is a fixed draw of normal numbers that all heads share, and the
heads forget from 1/32 to 1/512 of their past per token, evenly in the logarithm. Different from it,
all channels are rotated (their Pythia models rotate a quarter), and each head has its own norm
(theirs has K groups of H neighbouring channels). That code computes (Q K^T) V and keeps a cache of
keys; this is Q (K^T V) with a constant state: S [H, K, V] per layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import HeadsAttention, Losses, State, token_positions
from model.attention.retnet import head_log_decay
from model.attention.specs import AttentionConfig
from model.ops.layers import rotate
from model.ops.recurrence import recurrence_chunk, recurrence_step

#: As published: the first and the last head forget one part in so many with each token.
MEMORY = 32, 512


class DijiangAttention(HeadsAttention):
    """See the module's docstring. Option: ``published``."""

    frequency_draw: Tensor

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        heads, dim = config.num_attention_heads, config.head_dim
        self.published: bool = self.options["published"]
        if self.published:
            self.register_buffer("frequency_draw", torch.ones(dim))
        else:
            self.frequency_weight = nn.Parameter(torch.ones(heads, dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        super().reset_parameters(generator)
        with torch.no_grad():
            if self.published:
                self.frequency_draw.normal_(generator=generator)
            else:
                self.frequency_weight.fill_(1.0)

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        q, k, v, conv = self._features(x, state, token_positions(position, x.shape[1]))
        log_decay = self._log_decay(x.device).expand_as(q)
        num, s = recurrence_chunk(q, k, v, state["S"], log_decay, bounded=True)
        return self._merge(num, x), {"S": s, **conv}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        q, k, v, conv = self._features(x, state, position)
        num, s = recurrence_step(q, k, v, state["S"], self._log_decay(x.device))
        return self._merge(num, x), {"S": s, **conv}

    def _features(
        self, x: Tensor, state: State, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        q, k, v, conv = self._convolved(x, state)
        with torch.autocast(x.device.type, enabled=False):
            dct = cosine_transform(self.config.head_dim, x.device).to(q.dtype)
            weight = self.frequency_draw if self.published else self.frequency_weight
            if self.published:
                dct, q, k = dct.t(), rotate(q, positions), rotate(k, positions)
            q, k = ((t @ dct.t() * weight).softmax(dim=-1) for t in (q, k))
        return q, k, v, conv

    def _log_decay(self, device: torch.device) -> Tensor:
        if not self.published:
            return head_log_decay(self.num_heads, device).float().unsqueeze(1)
        first, last = (math.log(1 / tokens) for tokens in MEMORY)
        rate = torch.linspace(first, last, self.num_heads, dtype=torch.float64, device=device)
        return torch.log1p(-rate.exp()).float().unsqueeze(1)

    def _norm(self, o: Tensor) -> Tensor:
        assert self.norm_weight is not None
        normed = F.layer_norm(o, o.shape[-1:], eps=self.config.rms_norm_eps)
        return normed * self.norm_weight.float()

    def _gated_norm(self, o: Tensor, gate: Tensor) -> Tensor:
        return self._norm(o).to(gate.dtype) * F.silu(gate)


def cosine_transform(size: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II as a matrix [frequency, place] in float64."""
    place = torch.arange(size, dtype=torch.float64, device=device)
    matrix = torch.cos(math.pi / size * (place + 0.5) * place.unsqueeze(1))
    matrix[0] *= math.sqrt(0.5)
    return matrix * math.sqrt(2.0 / size)
