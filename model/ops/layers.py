"""Small layers that networks share: fused matrices, rows, short convolutions, rotary positions.

**Products** (`product`): in the step forms one side is a single row. A matrix library may add
the terms of such a product in an order that depends on the place of a sequence in the batch.
Multiplied and summed, they have one order.

**Convolution** (`convolution_chunk`, `convolution_step`): causal and depthwise over the last few
tokens, as a constant state,

    y_t = sum_{i < W} w_i * x_{t - W + 1 + i}

per channel, with zeros before the first token. The state is the last W - 1
inputs, oldest first.

**Rotary positions** (`rotate`): Su et al. 2021, "RoFormer", eq. 34, with angles in float64. Pairs
are (x_i, x_{i + K/2}), as in GPT-NeoX and Llama.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FusedLinear(nn.Linear):
    """A linear layer whose output is that of several, one after the other.

    ``parts`` are their output widths. One product is faster than several; an optimizer that
    looks at a matrix as a whole (`model.training.optimizer`) must look at each of them.
    """

    def __init__(self, in_features: int, parts: Sequence[int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts), bias=bias)
        self.parts = tuple(parts)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for ``a`` [..., R, K] and ``b`` [..., K, V]; multiplied and summed where R is 1."""
    if a.shape[-2] > 1:
        return a @ b
    return (a.transpose(-1, -2) * b).sum(dim=-2, keepdim=True)


def convolution_chunk(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [B, T, D], ``weight`` [D, W], ``state`` [B, W - 1, D] to y [B, T, D] and the state."""
    width = weight.shape[1]
    padded = torch.cat([state.to(x.dtype), x], dim=1)  # [B, W - 1 + T, D]
    y = F.conv1d(padded.transpose(1, 2), weight.unsqueeze(1), groups=x.shape[-1])
    return y.transpose(1, 2), padded[:, padded.shape[1] - width + 1 :].float()


def convolution_step(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [B, D] and otherwise like `convolution_chunk`."""
    window = torch.cat([state, x.unsqueeze(1)], dim=1)  # [B, W, D]
    return (window * weight.t()).sum(dim=1), window[:, 1:]


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotates ``x`` [..., H, K] by its ``positions`` [...] (int64); K is even."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.to(torch.float64).unsqueeze(-1) * frequency  # [..., K/2]
    cos, sin = (f(angle).to(x.dtype).unsqueeze(-2) for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
