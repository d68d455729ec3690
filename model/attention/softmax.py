"""The baseline: causal softmax attention with rotary positions and a cache that grows.

    o_t = sum_{j <= t} softmax_j(R_t q_t . R_j k_j / sqrt(K)) v_j

R_t is the rotation of `model.ops.layers` with base ``rope_theta``; with
``rotary`` "none" there is none, for checkpoints with learned positions.

Here to be measured against. Its state, the keys and values of all tokens so
far, is not constant, so the server refuses it; `state_spec` gives the cache of
an empty text, and `chunk` and `step` return a longer one each time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention.base import HeadsAttention, Losses, State, token_positions


class SoftmaxAttention(HeadsAttention):
    """See the module's docstring. All sessions of one batch have texts of one length.

    Options: ``rotary`` ("before" or "none"), ``rope_theta``.
    """

    def parallel(self, x: Tensor, losses: Losses = None) -> Tensor:
        start = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        q, k, v, _ = self._head_first(x, self.empty_state(x.shape[0], x.device), start)
        return self._output(F.scaled_dot_product_attention(q, k, v, is_causal=True), x)

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        q, k, v, conv = self._head_first(x, state, position)
        num_past, num_new = state["k"].shape[2], x.shape[1]
        k = torch.cat([state["k"].to(k.dtype), k], dim=2)
        v = torch.cat([state["v"].to(v.dtype), v], dim=2)
        mask = torch.ones(num_new, num_past + num_new, dtype=torch.bool, device=x.device)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.tril(num_past))
        return self._output(o, x), {"k": k.float(), "v": v.float(), **conv}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        y, state = self.chunk(x.unsqueeze(1), state, position)
        return y.squeeze(1), state

    def _head_first(
        self, x: Tensor, state: State, position: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        """q, k, v as [B, H, T, K] in the weights' dtype; q and k rotated in float32."""
        q, k, v, conv = self._project(x, state, token_positions(position, x.shape[1]))
        q, k, v = (part.transpose(1, 2).to(self.qkv.weight.dtype) for part in (q, k, v))
        return q, k, v, conv

    def _output(self, o: Tensor, x: Tensor) -> Tensor:
        return self._merge(o.transpose(1, 2), x)
