"""Exact softmax over the last W tokens and a linear state for all before them.

    w_ij = exp(q_i . k_j)                      for i - j < W
    w_ij = sum_f exp(P q_i - |q_i|^2/2)_f exp(P k_j - |k_j|^2/2)_f / m    for older j
    o_i = sum_j w_ij v_j / sum_j w_ij

with q and k scaled by K^-1/4. One denominator over both, and one maximum in
the exponents (`model.ops.window.join`). The features are those of FAVOR+
(`performer`), an estimate of the same kernel, so that the two parts are on one
scale from the start; P is trained from there. The combination is the one of
Zhang et al. 2024 ("LoLCATs", eq. 6), whose features are normalised instead.

Option ``older`` "forgotten" leaves out the second part, with its weights and its state: softmax
over the last W tokens alone.

State per layer: k [W, H, K] (scaled, and rotated where positions are) and v
[W, H, V], oldest first; S [H, m, V], z [H, m] in float64 and max [H, m] over
the tokens that left the window.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from model.attention.base import HeadsAttention, Losses, State, token_positions
from model.attention.performer import draw_projection
from model.attention.specs import AttentionConfig
from model.ops.exponential import exponential_chunk, log_positive_features
from model.ops.window import enter_window, has_left, join, window_attention


class WindowLinearAttention(HeadsAttention):
    """See the module's docstring.

    Options: ``window`` (W), ``features`` (m; 0 for K), ``older``, ``rotary``, ``rope_theta``.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.keeps_older = self.options["older"] == "linear"
        if self.keeps_older:
            self.projection = nn.Parameter(
                torch.zeros(self.spec.weight_shapes(config)["projection"])
            )

    def reset_parameters(self, generator: torch.Generator) -> None:
        super().reset_parameters(generator)
        if self.keeps_older:
            draw_projection(self.projection, generator, orthogonal=True)

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        num_tokens, window = x.shape[1], state["k"].shape[1]
        q, k, v, conv = self._project(x, state, token_positions(position, num_tokens))
        scale = self.config.head_dim**-0.25
        with torch.autocast(x.device.type, enabled=False):
            q, k = q * scale, k * scale
            keys, old_k, ring_k = enter_window(k, state["k"])
            values, old_v, ring_v = enter_window(v, state["v"])
            near = window_attention(q, keys, values, position)
            if self.keeps_older:
                valid = has_left(position, num_tokens, window)
                *far, new_state = exponential_chunk(
                    self._log_features(q), self._log_features(old_k), old_v, state, valid
                )
                o = join(near, (far[0], far[1], far[2]))
            else:
                new_state, o = {}, near[0] / near[1].unsqueeze(-1)
        return self._merge(o, x), {"k": ring_k, "v": ring_v, **new_state, **conv}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        y, state = self.chunk(x.unsqueeze(1), state, position)
        return y.squeeze(1), state

    def _log_features(self, x: Tensor) -> Tensor:
        log_m = math.log(self.projection.shape[1])
        return log_positive_features(x, self.projection) - log_m / 2
