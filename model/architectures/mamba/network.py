"""Mamba-1 in torch: the readable reference of the architecture.

A block is ``x + mixer(norm(x))``. The mixer's product gives x and z; a short convolution with a
bias and a silu goes over x, of which another product makes dt, B and C; Delta is the softplus of a
low-rank product of dt. For each channel, with N numbers of state h,

    h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t x_t,   y_t = (C_t . h_t + D x_t) silu(z_t)

(Gu and Dao 2023, arXiv 2312.00752, equations 2 and algorithm 2). Names as in the published weights
where they have one (A_log, D, dt).

The recurrence runs token by token: the decay differs for every number of the state, so that no
product of matrices does the work of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.decoder import Decoder, Mixer
from model.architectures.mamba.config import MambaConfig
from model.architectures.network import State
from model.ops.convolution import convolution_chunk, convolution_step
from model.ops.linear import FusedLinear
from model.ops.recurrence import decayed

#: A new model's Delta lies between these, evenly on a log scale.
DELTAS = (1e-3, 1e-1)


class MambaMixer(Mixer):
    """The state is ``conv`` [B, W - 1, d] and ``S`` [B, N, d]."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        inner, state = config.inner_size, config.state_size
        self.parts = (config.dt_rank, state, state)
        self.mixer_eps = config.mixer_norm_eps if config.mixer_norm else None
        self.num_layers = config.num_hidden_layers
        self.add_module("in", FusedLinear(config.hidden_size, (inner, inner)))
        self.conv = nn.Parameter(torch.empty(inner, config.conv_size))
        self.conv_bias = nn.Parameter(torch.empty(inner))
        self.x = FusedLinear(inner, self.parts)
        self.dt = nn.Linear(config.dt_rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, state))
        self.D = nn.Parameter(torch.empty(inner))
        self.out = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        """See `Mixer`."""
        mixed, z = self.get_submodule("in")(x).chunk(2, dim=-1)
        if x.shape[1] == 1:
            mixed, conv = convolution_step(mixed[:, 0].float(), self.conv.float(), state["conv"])
            mixed = mixed.unsqueeze(1)
        else:
            mixed, conv = convolution_chunk(mixed, self.conv.to(mixed.dtype), state["conv"])
        mixed = F.silu(mixed + self.conv_bias).to(x.dtype)
        dt, b, c = (self._normed(part) for part in self.x(mixed).split(self.parts, dim=-1))
        # softplus, which rounds differently at the end of a vector loop
        delta = -F.logsigmoid(-self.dt(dt).float())
        values = mixed.float()
        y, s = self._scan(values * delta, delta, b.float(), c.float(), state["S"])
        y = (y + self.D.float() * values) * F.silu(z.float())
        return self.out(y.to(x.dtype)), {"conv": conv, "S": s}

    def _normed(self, x: Tensor) -> Tensor:
        if self.mixer_eps is None:
            return x
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.mixer_eps).to(x.dtype)

    def _scan(
        self, x: Tensor, delta: Tensor, b: Tensor, c: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``x``, already times ``delta``, [B, T, d], ``b``, ``c`` [B, T, N]; y and the new S."""
        rate = -self.A_log.float().exp().mT  # [N, d]
        outputs = []
        for x_t, delta_t, b_t, c_t in zip(*(t.unbind(1) for t in (x, delta, b, c)), strict=True):
            state = decayed(state, delta_t.unsqueeze(1) * rate)
            state = torch.addcmul(state, b_t.unsqueeze(-1), x_t.unsqueeze(1))
            outputs.append((c_t.unsqueeze(-1) * state).sum(dim=1))
        return torch.stack(outputs, dim=1), state

    def init_weights(self, generator: torch.Generator) -> None:
        """As published (`mamba_ssm.modules.mamba_simple`, and the models' ``_init_weights``).

        What writes to the residual stream is divided by the square root of the number of layers.
        """
        for matrix in (self.get_parameter("in.weight"), self.x.weight, self.out.weight):
            _uniform(matrix, matrix.shape[1], generator)
        _uniform(self.dt.weight, self.dt.in_features, generator)
        for weight in (self.conv, self.conv_bias):
            _uniform(weight, self.conv.shape[1], generator)
        with torch.no_grad():
            self.out.weight /= self.num_layers**0.5
            low, high = (math.log(delta) for delta in DELTAS)
            delta = torch.empty_like(self.D).uniform_(low, high, generator=generator).exp()
            self.dt.bias.copy_(delta + torch.log(-torch.expm1(-delta)))  # softplus gives delta
            self.A_log.copy_(torch.arange(1, self.parts[1] + 1).log().expand_as(self.A_log))
        nn.init.ones_(self.D)


class Mamba(Decoder):
    """See `model.architectures.network.Network`. Positions play no part."""

    config: MambaConfig

    def __init__(self, config: MambaConfig) -> None:
        mixers = [MambaMixer(config) for _ in range(config.num_hidden_layers)]
        super().__init__(config, mixers, config.norm_eps, config.tied)


def _uniform(weight: Tensor, fan_in: int, generator: torch.Generator) -> None:
    """As torch's own layers begin."""
    nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5, generator=generator)
