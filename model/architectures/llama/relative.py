"""The far part of most layers: bounded features of what left the window, next to the near sum.

    phi_k(k) = softmax([k U, -k U])                      U per head of keys
    phi_q(q) = exp(a . q / sqrt(K) + b) softmax([q W, -q W])    W, a, b per head of queries
    S = sum phi_k(k_j) v_j^T,   z = sum phi_k(k_j)       over j that left the window
    o = (o_near + phi_q S) / (1 + phi_q z)

k and q are not rotated. The features are those of Zhang et al. 2024 ("The Hedgehog & the
Porcupine", eq. 6) and of LoLCATs (Zhang et al. 2024, eq. 6), which sums near weights at an
absolute scale; here o_near is the finished near average, so that far weights are relative to the
near sum: many heads rest on the first token for most queries, and a far weight that does not shrink
with it adds noise. Nothing needs a running maximum, because features are in (0, 1).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK = 64


class FarMaps(nn.Module):
    """What both far parts have: the maps to features U and W, and a query's weight, a and b."""

    #: b at the start.
    initial_scale: ClassVar[float]

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, features: int) -> None:
        super().__init__()
        self.key_map = nn.Parameter(torch.empty(num_kv_heads, head_dim, features // 2))
        self.query_map = nn.Parameter(torch.empty(num_heads, head_dim, features // 2))
        self.scale = nn.Parameter(torch.empty(num_heads, head_dim))
        self.bias = nn.Parameter(torch.empty(num_heads))
        FarMaps.init_weights(self)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Features of the first channels themselves, and the same small weight for all queries."""
        for part in (self.key_map, self.query_map):
            part.copy_(torch.eye(*part.shape[1:]).expand_as(part))
        self.scale.zero_()
        self.bias.fill_(self.initial_scale)


class RelativeFar(FarMaps):
    """See the module's docstring. At the start exp of ``initial_scale`` weighs its features."""

    initial_scale = -2.2

    def key_features(self, k: Tensor) -> Tensor:
        """phi_k: [B, H_kv, T, K] to [B, H_kv, T, m]."""
        return signed_softmax(k @ self.key_map.to(k.dtype))

    def query_features(self, q: Tensor) -> Tensor:
        """phi_q: [B, H, T, K] to [B, H, T, m]."""
        return signed_softmax(q @ self.query_map.to(q.dtype)) * far_weight(q, self.scale, self.bias)

    def empty_state(self, rows: int) -> Tensor:
        """S and, in the last column, z: zeros [rows, H_kv, m, K + 1]."""
        num_kv_heads, width, half = self.key_map.shape
        return self.key_map.new_zeros(rows, num_kv_heads, 2 * half, width + 1)

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reads T queries, before each of which a token enters the far part.

        ``q`` [B, H, T, K]; ``k``, ``v`` [B, H_kv, T, K] of the tokens that enter, not rotated;
        ``keep`` [B or 1, 1, T, 1] is 0 where none does, which is at the
        beginning of a text, and then 1. Returns phi_q S [B, H, T, K], phi_q z
        [B, H, T, 1] and the state after them.
        """
        features = self.key_features(k) * keep
        values = F.pad(v, (0, 1), value=1.0)
        sums, state = causal_sums(self.query_features(q), features, values, state)
        return sums[..., :-1], sums[..., -1:], state


def signed_softmax(x: Tensor) -> Tensor:
    """softmax([x, -x]): [..., m] to [..., 2 m]."""
    return torch.cat([x, -x], dim=-1).softmax(dim=-1)


def far_weight(q: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """exp(a . q / sqrt(K) + b) [B, H, T, 1] of q [B, H, T, K], a [H, K] and b [H]."""
    along = q @ (scale.to(q.dtype) / math.sqrt(q.shape[-1])).unsqueeze(-1)
    return (along + bias.view(-1, 1, 1)).exp()


def causal_sums(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(state + sum_{j <= i} k_j v_j^T)^T q_i in blocks.

    ``q`` [B, H, T, m], ``k`` [B, H_kv, T, m], ``v`` [B, H_kv, T, V], ``state`` [B, H_kv, m, V].
    Returns [B, H, T, V] and the state after T tokens.
    """
    num_tokens, group = q.shape[2], q.shape[1] // k.shape[1]
    block = min(BLOCK, num_tokens)
    padding = -num_tokens % block
    q, k, v = (F.pad(t, (0, 0, 0, padding)).unflatten(2, (-1, block)) for t in (q, k, v))
    rows = q.unflatten(1, (-1, group)).transpose(2, 3).flatten(3, 4)  # [B, H_kv, N, G C, m]
    ends = state.unsqueeze(2) + (k.transpose(-1, -2) @ v).cumsum(dim=2)
    before = torch.cat([state.unsqueeze(2), ends[:, :, :-1]], dim=2)
    mask = torch.ones(block, block, dtype=q.dtype, device=q.device).tril().repeat(group, 1)
    sums = rows @ before + (rows @ k.transpose(-1, -2) * mask) @ v
    sums = sums.unflatten(3, (group, block)).transpose(2, 3).flatten(1, 2)
    return sums.flatten(2, 3)[:, :, :num_tokens], ends[:, :, -1]
