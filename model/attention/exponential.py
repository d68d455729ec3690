"""Attention by exponential features; a mechanism gives the logarithms of its features.

    o_t = sum_f exp(lq_tf) S_f / sum_f exp(lq_tf) z_f

with S and z relative to a running maximum per feature (`model.ops.exponential`).
Nothing decays, so S and z are float64. State per layer: S [H, F, V], z [H, F],
max [H, F].

Queries and keys are scaled by K^-1/4 each, so that q . k is what softmax
attention divides by sqrt(K).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from model.attention.base import HeadsAttention, Losses, State, token_positions
from model.ops.exponential import exponential_chunk, exponential_step


class ExponentialAttention(HeadsAttention):
    """See the module's docstring. Subclasses give `log_features`."""

    @abstractmethod
    def log_features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled q and k [..., H, K] float32 to lq and lk [..., H, F]."""

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        positions = token_positions(position, x.shape[1])
        log_q, log_k, v, conv = self._log_features(x, state, positions)
        num, den, _, state = exponential_chunk(log_q, log_k, v, state)
        return self._merge(num / den.unsqueeze(-1), x), {**state, **conv}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        log_q, log_k, v, conv = self._log_features(x, state, position)
        num, den, state = exponential_step(log_q, log_k, v, state)
        return self._merge(num / den.unsqueeze(-1), x), {**state, **conv}

    def _log_features(
        self, x: Tensor, state: State, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        q, k, v, conv = self._project(x, state, positions)
        scale: float = self.config.head_dim**-0.25
        with torch.autocast(x.device.type, enabled=False):
            return *self.log_features(q * scale, k * scale), v, conv
