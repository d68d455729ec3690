"""Rotary position embedding (Su et al. 2021, RoFormer, eq. 34), angles in float64.

Pairs are (x_i, x_{i + K/2}), as in GPT-NeoX and Llama.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotates ``x`` [..., H, K] by its ``positions`` [...] (int64); K is even."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.to(torch.float64).unsqueeze(-1) * frequency  # [..., K/2]
    cos, sin = (f(angle).to(x.dtype).unsqueeze(-2) for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
