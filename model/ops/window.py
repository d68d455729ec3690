"""Softmax attention over the last W tokens, and what leaves that window.

    num_i = sum_{0 <= i - j < W} exp(s_ij - c_i) v_j,   den_i likewise,   c_i = max_j s_ij

with ``s_ij = q_i . k_j + bias_{i-j}``. The log scale c_i is returned too, so that the
two sums can be joined with those of older tokens under one denominator (`join`).

The state is a ring in order of age: the last W keys and values, oldest first,
zeros where there was no token yet. Block by block of `BLOCK` queries, each
meets only the W + `BLOCK` keys that it may see.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.layers import product

BLOCK = 64

#: num [B, T, H, V], den and log scale [B, T, H]: sums whose true value is times exp(scale).
Sums = tuple[Tensor, Tensor, Tensor]


def enter_window(x: Tensor, ring: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` [B, T, ...] after ``ring`` [B, W, ...].

    Returns both joined [B, W + T, ...], the T entries that leave the window
    [B, T, ...], and the new ring.
    """
    both = torch.cat([ring.to(x.dtype), x], dim=1)
    return both, both[:, : x.shape[1]], both[:, x.shape[1] :]


def has_left(position: Tensor, num_tokens: int, window: int) -> Tensor:
    """Which of the T entries that leave the window were tokens: [B, T] bool."""
    return position.unsqueeze(1) + torch.arange(num_tokens, device=position.device) >= window


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, bias: Tensor | None = None
) -> Sums:
    """``q`` [B, T, H, K]; ``k``, ``v`` [B, W + T, H, ...] as `enter_window` joins them.

    ``position`` [B] tokens came before; ``bias`` [H, W] is added by distance.
    """
    num_tokens, window = q.shape[1], k.shape[1] - q.shape[1]
    size = min(num_tokens, BLOCK)
    padding = (0, 0, 0, 0, 0, -num_tokens % size)
    q, k, v = (F.pad(t, padding) for t in (q, k, v))
    q = q.unflatten(1, (-1, size)).transpose(2, 3)  # [B, N, H, C, K]
    k = k.unfold(1, window + size, size)  # [B, N, H, K, W + C]
    v = v.unfold(1, window + size, size).transpose(-1, -2)  # [B, N, H, W + C, V]
    distance = torch.arange(size, device=q.device).unsqueeze(1) + window
    distance = distance - torch.arange(window + size, device=q.device)  # [C, W + C]
    scores = product(q, k)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)[:, distance.clamp(0, window - 1)]
    start = torch.arange(q.shape[1], device=q.device) * size - window
    first = position[:, None, None] + start[:, None] + torch.arange(window + size, device=q.device)
    seen = (distance >= 0) & (distance < window) & (first >= 0)[:, :, None, None, :]
    scores = scores.masked_fill(~seen, -torch.inf)  # [B, N, H, C, W + C]
    scale = scores.detach().amax(dim=-1)
    weights = (scores - scale.unsqueeze(-1)).exp()
    num = product(weights, v).transpose(2, 3).flatten(1, 2)
    den, scale = (t.transpose(2, 3).flatten(1, 2) for t in (weights.sum(dim=-1), scale))
    return num[:, :num_tokens], den[:, :num_tokens], scale[:, :num_tokens]


def join(a: Sums, b: Sums) -> Tensor:
    """One average over the terms of both, [B, T, H, V]."""
    scale = torch.maximum(a[2], b[2])
    weight_a, weight_b = (a[2] - scale).exp(), (b[2] - scale).exp()
    num = a[0] * weight_a.unsqueeze(-1) + b[0] * weight_b.unsqueeze(-1)
    return num / (a[1] * weight_a + b[1] * weight_b).unsqueeze(-1)
