"""cosFormer, causal and without end.

After Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention", eq. 10-13.

    w_ij = relu(q_i) . relu(k_j) cos(pi/2 (i - j) / M)
    o_i = sum_j w_ij v_j / max(sum_j w_ij, 1e-6)

through cos(a - b) = cos a cos b + sin a sin b: features [x cos, x sin], F = 2K.

The published code takes M = the current length, so that a prefix changes as the
text grows; here M is the option ``horizon``. At a distance beyond M the cosine
would turn negative, so a text is read in epochs of M/2 tokens, and a token sees
those of its own epoch and of the one before it: at least the last M/2 tokens,
never as many as M. Older ones are forgotten. So no weight is ever negative, and
sums are over at most M tokens; M is at most 2^20, so that float32 holds them.

State per layer: S [H, 2K, V], z [H, 2K] of the epoch of the last token seen, and
S_before, z_before of the one before it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention.base import HeadsAttention, Losses, State, token_positions
from model.attention.specs import AttentionConfig
from model.ops.layers import product

EPSILON = 1e-6
BLOCK = 64


class CosformerAttention(HeadsAttention):
    """See the module's docstring. Option: ``horizon`` (M, even)."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.epoch: int = self.options["horizon"] // 2

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        outputs = []
        q, k, v, conv = self._convolved(x, state)
        with torch.autocast(x.device.type, enabled=False):
            # A block no longer than an epoch meets at most one boundary between two.
            parts = (t.split(min(BLOCK, self.epoch), dim=1) for t in (q, k, v))
            for block_q, block_k, block_v in zip(*parts, strict=True):
                o, state = self._block(block_q, block_k, block_v, state, position)
                outputs.append(o)
                position = position + o.shape[1]
        return self._merge(torch.cat(outputs, dim=1), x), {**state, **conv}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        y, state = self.chunk(x.unsqueeze(1), state, position)
        return y.squeeze(1), state

    def _block(
        self, q: Tensor, k: Tensor, v: Tensor, state: State, position: Tensor
    ) -> tuple[Tensor, State]:
        """At most one boundary between epochs lies before or inside these C tokens."""
        positions = token_positions(position, q.shape[1])
        q, k = (self._features(t, positions).transpose(1, 2) for t in (q, k))  # [B, H, C, 2K]
        v = F.pad(v, (0, 1), value=1.0).transpose(1, 2)  # [B, H, C, V + 1]
        now = torch.cat([state["S"], state["z"].unsqueeze(-1)], dim=-1)
        before = torch.cat([state["S_before"], state["z_before"].unsqueeze(-1)], dim=-1)
        # 1 for tokens of a later epoch than the last token seen, which see one epoch less.
        last_seen = (position.unsqueeze(1) - 1).clamp_min(0)
        later = positions // self.epoch > last_seen // self.epoch
        later = later.to(q.dtype)[:, None, :, None]
        near = product(product(q, k.transpose(-1, -2)).tril(), v)
        both = near + product(q, now) + (1 - later) * product(q, before)
        added_now = ((1 - later) * k).transpose(-1, -2) @ v
        added_next = (later * k).transpose(-1, -2) @ v
        rolled = later[:, :, -1:]
        before = rolled * (now + added_now) + (1 - rolled) * before
        now = (1 - rolled) * (now + added_now) + added_next
        o = both[..., :-1] / both[..., -1:].clamp_min(EPSILON)
        new_state = {
            "S": now[..., :-1],
            "z": now[..., -1],
            "S_before": before[..., :-1],
            "z_before": before[..., -1],
        }
        return o.transpose(1, 2), new_state

    def _features(self, x: Tensor, positions: Tensor) -> Tensor:
        """[relu(x) cos, relu(x) sin] of angles in float64, whole turns taken off."""
        angle = (positions % (8 * self.epoch)).double() * (math.pi / 4 / self.epoch)
        angle = angle[..., None, None]
        x = F.relu(x)
        return torch.cat([x * angle.cos().to(x.dtype), x * angle.sin().to(x.dtype)], dim=-1)
