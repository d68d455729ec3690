"""Gated output attention whose q, k and v pass a short causal convolution and a silu first."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import State
from model.attention.heads import GatedOutputAttention
from model.attention.spec import AttentionConfig
from model.ops.convolution import convolution_step
from model.ops.fused.convolution import convolved_silu


class ConvolvedAttention(GatedOutputAttention):
    """Option ``conv_size`` W: the last W tokens, 0 for neither convolution nor silu.

    State: S [H, K, V] and, with a convolution, conv [W - 1, H (2 K + V)].
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.conv_size = self.options["conv_size"]
        if self.conv_size:
            width = self.qkv.out_features
            self.conv_weight = nn.Parameter(torch.zeros(width, self.conv_size))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Convolutions start as the identity."""
        super().reset_parameters(generator)
        if self.conv_size:
            with torch.no_grad():
                self.conv_weight.zero_()
                self.conv_weight[:, -1] = 1.0

    def _convolved_chunk(self, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor, State]:
        qkv, new_state = self.qkv(x), {}
        if self.conv_size:
            qkv, new_state["conv"] = convolved_silu(qkv, self.conv_weight, state["conv"])
        return *self._heads(qkv), new_state

    def _convolved_step(self, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor, State]:
        qkv, new_state = self.qkv(x), {}
        if self.conv_size:
            qkv, new_state["conv"] = convolution_step(qkv, self.conv_weight, state["conv"])
            qkv = F.silu(qkv)
        return *self._heads(qkv), new_state
