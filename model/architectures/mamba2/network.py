"""Mamba-2 in torch: the readable reference of the architecture.

A block is ``x + mixer(norm(x))``. The mixer's product gives z, x, B, C and dt; a short convolution
with a bias and a silu goes over x, B and C; Delta = softplus(dt + dt_bias). After the recurrence
(`model.architectures.mamba2.ssd`) each head adds D times its x, the channels are gated by silu(z)
and then normed within their group. Equations: arXiv 2405.21060; names as in the published weights
where they have one (dt_bias, A_log, D).

Delta is not clamped, as in the published step and in llama.cpp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.decoder import Decoder, Mixer
from model.architectures.mamba2 import ssd
from model.architectures.mamba2.config import Mamba2Config
from model.architectures.network import State
from model.ops.convolution import convolution_chunk, convolution_step
from model.ops.linear import FusedLinear

#: A new model's Delta lies between these, evenly on a log scale, and its -A in this range.
DELTAS, RATES = (1e-3, 1e-1), (1.0, 16.0)


class Mamba2Mixer(Mixer):
    """The state is ``conv`` [B, W - 1, channels] and ``S`` [B, H, N, P]."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        inner, heads = config.inner_size, config.num_attention_heads
        self.heads = (heads, config.head_dim)
        self.groups = (config.num_groups, config.state_size)
        self.norm_eps, self.num_layers = config.norm_eps, config.num_hidden_layers
        writes = math.prod(self.groups)
        parts = (inner, inner, writes, writes, heads)
        self.add_module("in", FusedLinear(config.hidden_size, parts))
        self.conv = nn.Parameter(torch.empty(config.conv_channels, config.conv_size))
        self.conv_bias = nn.Parameter(torch.empty(config.conv_channels))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm = nn.RMSNorm(inner, config.norm_eps)
        self.out = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        """See `Mixer`."""
        inner, writes = math.prod(self.heads), math.prod(self.groups)
        sizes = (inner, inner + 2 * writes, self.heads[0])
        z, mixed, dt = self.get_submodule("in")(x).split(sizes, dim=-1)
        is_step = x.shape[1] == 1
        if is_step:
            mixed, conv = convolution_step(mixed[:, 0].float(), self.conv.float(), state["conv"])
            mixed = mixed.unsqueeze(1)
        else:
            mixed, conv = convolution_chunk(mixed, self.conv.to(mixed.dtype), state["conv"])
        mixed = F.silu(mixed + self.conv_bias).float()
        values, b, c = mixed.split((inner, writes, writes), dim=-1)
        values = values.unflatten(-1, self.heads)
        b, c = (t.unflatten(-1, self.groups) for t in (b, c))
        # softplus, which rounds differently at the end of a vector loop
        delta = -F.logsigmoid(-(dt.float() + self.dt_bias.float()))
        log_decay = -self.A_log.float().exp() * delta
        scaled = values * delta.unsqueeze(-1)
        if is_step:
            y, s = ssd.step(scaled[:, 0], log_decay[:, 0], b[:, 0], c[:, 0], state["S"])
            y = y.unsqueeze(1)
        else:
            y, s = ssd.chunk(scaled, log_decay, b, c, state["S"])
        y = (y + self.D.float().unsqueeze(-1) * values).flatten(-2)
        return self.out(self._gated_norm(y, z).to(x.dtype)), {"conv": conv, "S": s}

    def _gated_norm(self, y: Tensor, z: Tensor) -> Tensor:
        gated = (y * F.silu(z.float())).unflatten(-1, (self.groups[0], -1))
        normed = F.rms_norm(gated, gated.shape[-1:], eps=self.norm_eps).flatten(-2)
        return normed * self.norm.weight.float()

    def init_weights(self, generator: torch.Generator) -> None:
        """As published (`mamba_ssm.modules.mamba2`, and the models' ``_init_weights``).

        What writes to the residual stream is divided by the square root of the number of layers.
        """
        for matrix in (self.get_parameter("in.weight"), self.out.weight):
            _uniform(matrix, matrix.shape[1], generator)
        for weight in (self.conv, self.conv_bias):
            _uniform(weight, self.conv.shape[1], generator)
        with torch.no_grad():
            self.out.weight /= self.num_layers**0.5
            low, high = (math.log(delta) for delta in DELTAS)
            delta = torch.empty_like(self.dt_bias).uniform_(low, high, generator=generator).exp()
            self.dt_bias.copy_(delta + torch.log(-torch.expm1(-delta)))  # softplus gives delta
            self.A_log.uniform_(*RATES, generator=generator).log_()
        nn.init.ones_(self.D)


class Mamba2(Decoder):
    """See `model.architectures.network.Network`. Positions play no part."""

    config: Mamba2Config

    def __init__(self, config: Mamba2Config) -> None:
        mixers = [Mamba2Mixer(config) for _ in range(config.num_hidden_layers)]
        super().__init__(config, mixers, config.norm_eps, config.tied)


def _uniform(weight: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """As torch's own layers begin."""
    nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5, generator=generator)
