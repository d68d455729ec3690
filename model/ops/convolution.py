"""Causal depthwise convolution over the last few tokens, as a constant state.

    y_t = sum_{i < W} w_i * x_{t - W + 1 + i}

per channel, with zeros before the first token. The state is the last W - 1
inputs, oldest first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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
