"""Efficient Attention, causal.

After Shen et al. 2018, "Efficient Attention: Attention with Linear
Complexities", section 3.2.

    o_t = sum_f softmax(q_t)_f  sum_j exp(k_jf) v_j / sum_j exp(k_jf)

q is normalised over its features, k over the *positions* so far, each feature
by itself. That is not the general form with phi = exp and one denominator; the
paper's own softmax runs over the whole sequence and is not causal. No scaling
of q and k, as in the paper.

Option ``denominator`` "weights" is that general form, with one sum of the weights:

    o_t = sum_f exp(q_tf)  sum_j exp(k_jf) v_j / sum_f exp(q_tf) sum_j exp(k_jf)

Exponentials are relative to a running maximum per feature. Nothing decays, so
S and z are float64. State per layer: S [H, K, V], z [H, K], max [H, K].
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.attention.base import HeadsAttention, Losses, State, token_positions
from model.ops.exponential import (
    LOG_ZERO,
    exponential_chunk,
    exponential_step,
    key_step,
    running_max,
)
from model.ops.recurrence import decayed, recurrence_chunk, recurrence_step


class EfficientAttention(HeadsAttention):
    """See the module's docstring. Options: ``denominator``, ``rotary``, ``rope_theta``."""

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        positions = token_positions(position, x.shape[1])
        q, log_k, v, conv = self._project(x, state, positions)
        if self.options["denominator"] == "weights":
            num, den, _, state = exponential_chunk(q, log_k, v, state)
            return self._merge(num / den.unsqueeze(-1), x), {**state, **conv}
        maximum, log_decay = running_max(log_k, state["z"], state["max"])
        log_z = _log_normalizer(log_k, state)
        read = q.softmax(dim=-1) * (maximum - log_z).exp().to(q.dtype)
        k = (log_k - maximum).exp()
        num, s = recurrence_chunk(read, k, v, state["S"], log_decay)
        z = (log_z[:, -1] - maximum[:, -1]).exp()
        return self._merge(num, x), {"S": s, "z": z, "max": maximum[:, -1], **conv}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        q, log_k, v, conv = self._project(x, state, position)
        if self.options["denominator"] == "weights":
            num, den, state = exponential_step(q, log_k, v, state)
            return self._merge(num / den.unsqueeze(-1), x), {**state, **conv}
        k, log_decay, maximum = key_step(log_k, state)
        z = decayed(state["z"], log_decay) + k
        read = q.softmax(dim=-1) / z.to(q.dtype)
        num, s = recurrence_step(read, k, v, state["S"], log_decay)
        return self._merge(num, x), {"S": s, "z": z, "max": maximum, **conv}


def _log_normalizer(log_k: Tensor, state: State) -> Tensor:
    """The logarithm of sum_{j <= t} exp(k_jf) after each token, [B, T, H, K] float64."""
    before = state["z"].clamp_min(1.0).log() + state["max"]
    before = before.masked_fill(state["z"] <= 0, LOG_ZERO)
    path = torch.cat([before.unsqueeze(1), log_k.to(before.dtype)], dim=1)
    return path.logcumsumexp(dim=1)[:, 1:]
