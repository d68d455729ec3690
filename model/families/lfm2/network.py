"""LFM2 as published (transformers' ``lfm2``), dense: gated short convolutions and attention.

With h the normed input, a depthwise causal convolution and no activation:

    B, C, u = W_in h,   y = W_out (C * conv(B * u))

Attention is `model.architectures.decoder`, without a gate and all channels rotary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.architectures.decoder import BoundedAttention, Decoder, Mixer
from model.architectures.network import State
from model.families.lfm2.config import Lfm2Config
from model.ops.layers import convolution_chunk


class Lfm2(Decoder):
    """See `model.architectures.network.Network`."""

    def __init__(self, config: Lfm2Config) -> None:
        mixers = [
            BoundedAttention.of(config, rotary_dim=config.head_dim)
            if is_attention
            else ShortConvolution(config)
            for is_attention in config.is_attention
        ]
        super().__init__(config, mixers, config.norm_eps, config.tied)


class ShortConvolution(Mixer):
    """See the module. State "conv" [B, W - 1, D]: the last values of B * u."""

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.add_module("in", nn.Linear(width, 3 * width, bias=False))
        self.conv = nn.Parameter(torch.empty(width, config.conv_size))
        self.out = nn.Linear(width, width, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """The convolution as torch's own."""
        bound = self.conv.shape[1] ** -0.5
        with torch.no_grad():
            self.conv.uniform_(-bound, bound, generator=generator)

    def forward(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        """See `Mixer`."""
        before, after, u = self.get_submodule("in")(x).chunk(3, dim=-1)
        y, conv = convolution_chunk(before * u, self.conv, state["conv"])
        return self.out(after * y), {"conv": conv}
