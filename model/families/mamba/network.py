"""Mamba-1 and Mamba-2 in torch: the readable references of the architectures."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.decoder import Decoder, Mixer
from model.architectures.network import State
from model.families.mamba.config import Mamba2Config, MambaConfig
from model.ops.layers import FusedLinear, convolution_chunk, convolution_step, product
from model.ops.recurrence import decayed

# A block is ``x + mixer(norm(x))``. The mixer's product gives x and z; a short convolution with a
# bias and a silu goes over x, of which another product makes dt, B and C; Delta is the softplus of
# a low-rank product of dt. For each channel, with N numbers of state h,
#
#     h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t x_t,   y_t = (C_t . h_t + D x_t) silu(z_t)
#
# (Gu and Dao 2023, arXiv 2312.00752, equations 2 and algorithm 2). Names as in the published
# weights where they have one (A_log, D, dt).
#
# The recurrence runs token by token: the decay differs for every number of the state, so that no
# product of matrices does the work of a block.


#: A new model's Delta lies between these, evenly on a log scale.
DELTAS = (1e-3, 1e-1)
#: Of dt, B and C, where they have weights.
NORMS = ("dt_norm", "b_norm", "c_norm")


class MambaMixer(Mixer):
    """The state is ``conv`` [B, W - 1, d] and ``S`` [B, N, d].

    ``norm_weights``: whether the norms of dt, B and C, which a config may have, have weights.
    """

    def __init__(self, config: MambaConfig, norm_weights: bool = False) -> None:
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
        for name, size in zip(NORMS, self.parts, strict=True):
            self.add_module(name, nn.RMSNorm(size, self.mixer_eps) if norm_weights else None)
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
        dt, b, c = map(self._normed, NORMS, self.x(mixed).split(self.parts, dim=-1))
        # softplus, which rounds differently at the end of a vector loop
        delta = -F.logsigmoid(-self.dt(dt).float())
        values = mixed.float()
        y, s = self._scan(values * delta, delta, b.float(), c.float(), state["S"])
        y = (y + self.D.float() * values) * F.silu(z.float())
        return self.out(y.to(x.dtype)), {"conv": conv, "S": s}

    def _normed(self, name: str, x: Tensor) -> Tensor:
        if self.mixer_eps is None:
            return x
        norm = getattr(self, name)
        weight = None if norm is None else norm.weight.float()
        return F.rms_norm(x.float(), x.shape[-1:], weight, self.mixer_eps).to(x.dtype)

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


# -------------------------------------------------------------------------------------------------
# The recurrence of Mamba-2, token by token and in blocks of tokens.
#
#     S_t = exp(l_t) S_{t-1} + B_t x_t^T,   y_t = S_t^T C_t
#
# for each head, with S [N, P], x_t already times its step size Delta_t, and l_t = Delta_t A the log
# of a decay that all numbers of a head share. B and C are shared by the heads of a group. This is
# equation 16 of Dao and Gu 2024 ("Transformers are SSMs", arXiv 2405.21060) with S transposed.
#
# Blocks are their algorithm of section 6. With b_i the sum of l from the block's start through
# token i, token i reads
#
#     exp(b_i) S_in^T C_i  +  sum_{j <= i} (C_i . B_j) exp(b_i - b_j) x_j
#
# so a block costs two products with S and a masked one inside. The sums b are float64: their
# differences are then exact to float32 for decays of any strength.
#
# H heads in G groups, R = H / G heads of each; M blocks of K tokens.


BLOCK = 64


def step(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: ``x`` [B, H, P], ``log_decay`` [B, H], ``b``, ``c`` [B, G, N]; all float32.

    ``state`` S [B, H, N, P]. Returns y [B, H, P] and the new S.
    """
    each = x.shape[1] // b.shape[1]
    b, c = (t.repeat_interleave(each, dim=1) for t in (b, c))
    state = decayed(state, log_decay[..., None, None])
    state = torch.addcmul(state, b.unsqueeze(-1), x.unsqueeze(-2))
    return product(c.unsqueeze(-2), state).squeeze(-2), state


def chunk(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """T tokens: ``x`` [B, T, H, P], ``log_decay`` [B, T, H], ``b``, ``c`` [B, T, G, N].

    ``state`` S [B, H, N, P]. Returns y [B, T, H, P] and the new S. In float32 under autocast too.
    """
    with torch.autocast(state.device.type, enabled=False):
        return _chunk(x, log_decay, b, c, state)


def _chunk(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    num_tokens, groups = x.shape[1], b.shape[2]
    heads = (groups, x.shape[2] // groups)
    x = _blocks(x.unflatten(2, heads))  # [B, G, M, K, R, P]
    log_decay = _blocks(log_decay.unflatten(2, heads)).movedim(-1, -2)  # [B, G, M, R, K]
    b, c = _blocks(b), _blocks(c)  # [B, G, M, K, N]
    sums = log_decay.cumsum(dim=-1, dtype=torch.float64)
    inside = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(x.dtype)  # [B, G, M, R, K, K]
    later = torch.ones(inside.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    scores = (c @ b.mT).unsqueeze(3) * inside.masked_fill(later, -torch.inf).exp()
    y = (scores @ x.transpose(3, 4)).transpose(3, 4)
    end = sums[..., -1:]
    written = x * (end - sums).to(x.dtype).exp().mT.unsqueeze(-1)
    added = b.mT @ written.flatten(-2)  # [B, G, M, N, R P]
    state = state.unflatten(1, heads).movedim(2, 3).flatten(-2)  # [B, G, N, R P]
    before, state = _scan(state, added, end.to(x.dtype), x.shape[-1])
    from_state = (c @ before).unflatten(-1, x.shape[-2:])
    y = y + from_state * sums.to(x.dtype).exp().mT.unsqueeze(-1)
    state = state.unflatten(-1, x.shape[-2:]).movedim(3, 2).flatten(1, 2)
    return y.movedim(1, 3).flatten(1, 2)[:, :num_tokens].flatten(2, 3), state


def _scan(state: Tensor, added: Tensor, log_decay: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The states before each block, [B, G, M, N, R P], and the one after the last.

    ``log_decay`` [B, G, M, R, 1] is that of whole blocks, ``width`` P.
    """
    log_decay = log_decay.mT.repeat_interleave(width, dim=-1)  # [B, G, M, 1, R P]
    before = []
    # Not indexed: the gradient of each index would be as large as all blocks together.
    for added_m, decay_m in zip(added.unbind(2), log_decay.unbind(2), strict=True):
        before.append(state)
        state = decayed(state, decay_m) + added_m
    return torch.stack(before, dim=2), state


def _blocks(x: Tensor) -> Tensor:
    """[B, T, G, ...] to [B, G, M, K, ...]; tokens of zeros at the end change no state."""
    size = min(BLOCK, x.shape[1])
    missing = -x.shape[1] % size
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    blocks: Tensor = x.unflatten(1, (-1, size))
    return blocks.movedim(3, 1)


# -------------------------------------------------------------------------------------------------
# A block is ``x + mixer(norm(x))``. The mixer's product gives z, x, B, C and dt; a short
# convolution with a bias and a silu goes over x, B and C; Delta = softplus(dt + dt_bias). After the
# recurrence above each head adds D times its x, the channels are gated
# by silu(z) and then normed within their group, but in some hybrids, which have no such norm.
# Equations: arXiv 2405.21060; names as in the published weights where they have one (dt_bias,
# A_log, D).
#
# Delta is not clamped, as in the published step and in llama.cpp.


#: A new model's Delta lies between these, evenly on a log scale, and its -A in this range.
MAMBA2_DELTAS, RATES = (1e-3, 1e-1), (1.0, 16.0)


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
        self.norm = nn.RMSNorm(inner, config.norm_eps) if config.mixer_norm else None
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
            y, s = step(scaled[:, 0], log_decay[:, 0], b[:, 0], c[:, 0], state["S"])
            y = y.unsqueeze(1)
        else:
            y, s = chunk(scaled, log_decay, b, c, state["S"])
        y = (y + self.D.float().unsqueeze(-1) * values).flatten(-2)
        return self.out(self._gated_norm(y, z).to(x.dtype)), {"conv": conv, "S": s}

    def _gated_norm(self, y: Tensor, z: Tensor) -> Tensor:
        gated = y * F.silu(z.float())
        if self.norm is None:
            return gated
        gated = gated.unflatten(-1, (self.groups[0], -1))
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
            low, high = (math.log(delta) for delta in MAMBA2_DELTAS)
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
