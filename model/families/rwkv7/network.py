"""RWKV-7 and ARWKV in torch: the readable references of the architectures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.decoder import Decoder, DecoderBlock
from model.architectures.network import Losses, ModelState, Network, State
from model.families.rwkv7.config import (
    Arwkv7Config,
    Rwkv7Config,
    TimeMixConfig,
    time_mix_shapes,
)
from model.ops.layers import product
from model.tensor_spec import Shape

# -------------------------------------------------------------------------------------------------
# The recurrence of RWKV-7's time mix, token by token and in blocks of tokens.
#
#     S_t = diag(w_t) S_{t-1} - d_t u_t^T + k_t v_t^T,   u_t = S_{t-1}^T c_t,   y_t = S_t^T r_t
#
# for each head, with S [key, value] and w = exp(log_w). This is equation 15 of arXiv
# 2503.14456 transposed, with c the normalised removal key (kappa hat) and d = c * a, a the
# in-context learning rate. ``c`` reads the state before it decays.
#
# Inside a block of C tokens let b_t be the sum of log_w through token t. Then
#
#     u_t = (c_t e^(b_{t-1}))^T S_in + sum_{j < t} (c_t e^(b_{t-1} - b_j)) . (k_j v_j^T - d_j u_j^T)
#
# is a triangular system for U [C, value], and outputs and the new state are sums of the same
# kind. A product of e^b_t and e^-b_j takes the place of the difference: log_w is above
# -e^-0.5, so over 16 tokens e^-b stays below 1.7e4.


BLOCK = 16


class Inputs(NamedTuple):
    """What each token brings, [..., H, N] float32 each, by the module's names."""

    r: Tensor
    log_w: Tensor
    k: Tensor
    v: Tensor
    c: Tensor
    d: Tensor


#: Either form below: inputs and S to outputs and the new S.
Recurrence = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]


def step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token, inputs [B, H, N], ``state`` S [B, H, N, N]; y [B, H, N] and the new S."""
    u = product(inputs.c.unsqueeze(-2), state)  # [B, H, 1, N]
    state = state * inputs.log_w.exp().unsqueeze(-1)
    state = torch.addcmul(state, inputs.d.unsqueeze(-1), u, value=-1)
    state = torch.addcmul(state, inputs.k.unsqueeze(-1), inputs.v.unsqueeze(-2))
    return product(inputs.r.unsqueeze(-2), state).squeeze(-2), state


def chunk(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """T tokens, inputs [B, T, H, N], ``state`` S [B, H, N, N]; y [B, T, H, N] and the new S.

    In float32 under autocast too.
    """
    with torch.autocast(state.device.type, enabled=False):
        return _chunk(inputs, state)


def _chunk(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens = inputs.r.shape[1]
    r, log_w, k, v, c, d = (_blocks(tensor) for tensor in inputs)
    b = log_w.cumsum(dim=-2)
    end = b[..., -1:, :]
    r, c = r * b.exp(), c * (b - log_w).exp()
    k_in, d_in = (k * (-b).exp()).transpose(-1, -2), (d * (-b).exp()).transpose(-1, -2)
    k_out, d_out = (k * (end - b).exp()).transpose(-1, -2), (d * (end - b).exp()).transpose(-1, -2)
    # U = from_state S_in + from_values
    system = (c @ d_in).tril(-1)  # ones on the diagonal are implied by `unitriangular`
    right = torch.cat([c, (c @ k_in).tril(-1) @ v], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_state, from_values = solved.chunk(2, dim=-1)
    values, removed = (r @ k_in).tril() @ v, (r @ d_in).tril()
    written, decay = k_out @ v, end.exp().transpose(-1, -2)
    # `unbind`, because the gradient of an index is as large as what is indexed.
    blocks = (from_state, from_values, r, values, removed, decay, written, d_out)
    outputs = []
    for u_s, u_v, r_n, y_v, y_u, w_n, s_v, s_u in zip(
        *(tensor.unbind(2) for tensor in blocks), strict=True
    ):
        u = u_s @ state + u_v
        outputs.append(r_n @ state + y_v - y_u @ u)
        state = w_n * state + s_v - s_u @ u
    y = torch.stack(outputs, dim=2).flatten(2, 3).transpose(1, 2)
    return y[:, :num_tokens], state


def _blocks(x: Tensor) -> Tensor:
    """[B, T, H, N] to [B, H, blocks, C, N]; what is missing at the end is zeros."""
    missing = -x.shape[1] % BLOCK
    x = F.pad(x, (0, 0, 0, 0, 0, missing)).transpose(1, 2)
    blocks: Tensor = x.unflatten(2, (-1, BLOCK))
    return blocks.contiguous()


# -------------------------------------------------------------------------------------------------
# RWKV-7's time mix, which more than one family has.
#
# Equations: arXiv 2503.14456, section 3 and appendix; names as in the published weights where they
# have one (k_k, k_a, r_k). The output gate and the norm of each head's output are left out where
# the config has none.


#: log w = -e^-0.5 sigmoid(...): no channel decays faster than to 0.545 per token.
MAX_LOG_DECAY = math.exp(-0.5)


class LowRank(nn.Module):
    """``f(x A) B + bias``."""

    def __init__(self, width: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=bias)

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        x = self.down(x)
        y: Tensor = self.up(x if f is None else f(x))
        return y


class TimeMix(nn.Module):
    """Token mixing. ``shift_mix`` has the rows r, w, k, v, a, and g if there is a gate."""

    def __init__(self, config: TimeMixConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = (config.num_attention_heads, config.head_dim)
        self.shift_mix = nn.Parameter(torch.empty(6 if config.gate_rank else 5, width))
        self.k_k = nn.Parameter(torch.empty(width))
        self.k_a = nn.Parameter(torch.empty(width))
        self.r_k = nn.Parameter(torch.empty(self.heads))
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.decay = LowRank(width, config.decay_rank)
        self.rate = LowRank(width, config.rate_rank)
        if layer > 0:
            self.value_mix = LowRank(width, config.value_rank)
        self.gate = LowRank(width, config.gate_rank, bias=False) if config.gate_rank else None
        heads, eps = config.num_attention_heads, config.group_norm_eps
        self.group_norm = nn.GroupNorm(heads, width, eps) if config.group_norm else None

    def forward(
        self, x: Tensor, before: Tensor, v_first: Tensor | None, s: Tensor, run: Recurrence
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` and the inputs ``before`` it, [..., D]; output, the new S, and layer 0's values."""
        r, w, k, v, a, *rest = (torch.lerp(x, before, mix) for mix in self.shift_mix)
        log_w = -MAX_LOG_DECAY * self.decay(w, torch.tanh).float().sigmoid()
        rate = self.rate(a).float().sigmoid()
        r, k, values = self.receptance(r), self.key(k), self.value(v)
        if v_first is None:
            v_first = values
        else:
            values = torch.lerp(values, v_first, self.value_mix(v).sigmoid())
        r, k, values = r.float(), k.float(), values.float()
        removal = F.normalize(self._per_head(k * self.k_k), dim=-1, eps=1e-12)
        k = k * (1 + (rate - 1) * self.k_a)
        r, log_w, k, values, rate = map(self._per_head, (r, log_w, k, values, rate))
        y, s = run(Inputs(r, log_w, k, values, removal, removal * rate), s)
        if self.group_norm is not None:
            y = F.layer_norm(y, y.shape[-1:], eps=self.group_norm.eps)
            y = y * self._per_head(self.group_norm.weight) + self._per_head(self.group_norm.bias)
        bonus = (r * k * self.r_k).sum(dim=-1, keepdim=True) * values
        y = (y + bonus).flatten(-2).to(x.dtype)
        if self.gate is not None:
            y = y * self.gate(rest[0], torch.sigmoid)
        return self.output(y), s, v_first

    def _per_head(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, self.heads)
        return heads


def shifted(x: Tensor, first: Tensor) -> Tensor:
    """The row before each of ``x`` [B, T, D]; before the first one there is ``first`` [B, D]."""
    return torch.cat([first.to(x.dtype).unsqueeze(1), x[:, :-1]], dim=1)


# -------------------------------------------------------------------------------------------------
# What training starts an RWKV-7 from: the initial weights of the published models.
#
# From the trainer that made them (RWKV-LM, RWKV-v7/train_temp/src/model.py: the constructors and
# ``generate_init_weight``). Its own words for the vectors: each is a curve over the channels,
# and most of the curves depend on the layer.
#
# - Both mixes add nothing at first: ``output`` of the time mix and ``value`` of the channel mix
#   are zero. The low-rank maps add nothing to their biases, since ``down`` is zero.
# - Embeddings are tiny (the norm after them makes steps large), the other matrices orthogonal.
# - Token shifts look back less in the later layers and in the later channels of a layer.
# - Decays range from slow in the first channel to fast in the last, and within each head too.
#
# Symbols: D width, N head size, L layers, l the layer from 0, i the channel from 0.


#: Exponents of the token shifts, in the order of the rows of ``shift_mix``: r, w, k, v, a, g.
SHIFT_POWERS = (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)
EMBEDDING_RANGE = 1e-4
#: Gain of the key's matrix and of ``up`` of the low-rank maps; other matrices have 1.
SMALL_GAIN = 0.1


def initial_weights(config: Rwkv7Config, generator: torch.Generator) -> dict[str, Tensor]:
    """Every weight of `Rwkv7Config.weight_shapes`, float32 on the CPU."""
    shapes = config.weight_shapes()
    weights = {name: _initial(name, shape, generator) for name, shape in shapes.items()}
    for layer in range(config.num_hidden_layers):
        early = 1.0 - layer / config.num_hidden_layers
        channel = torch.arange(config.hidden_size) / config.hidden_size
        weights[f"blocks.{layer}.channel_mix.shift_mix"] = 1 - channel**early**4
        for name, curve in _curves(config, layer).items():
            weights[f"blocks.{layer}.time_mix.{name}"] = curve
    return weights


def initial_time_mix(
    config: TimeMixConfig, layer: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Every weight of `time_mix_shapes`, for another family's blocks."""
    shapes = time_mix_shapes(config, layer)
    weights = {
        name: _initial(f"time_mix.{name}", shape, generator) for name, shape in shapes.items()
    }
    return weights | _curves(config, layer)


def _initial(name: str, shape: Shape, generator: torch.Generator) -> Tensor:
    """A weight that is no curve."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if len(shape) == 1 or name.endswith(_ZERO):
        return torch.zeros(shape)
    if name == "embedding.weight":
        most = EMBEDDING_RANGE
        return torch.empty(shape).uniform_(-most, most, generator=generator)
    return nn.init.orthogonal_(torch.empty(shape), _gain(name, shape), generator=generator)


#: Matrices that are zero.
_ZERO = ("time_mix.output.weight", "channel_mix.value.weight", ".down.weight")


def _gain(name: str, shape: Shape) -> float:
    """Of an orthogonal matrix [out, in]."""
    num_rows, num_columns = shape
    if name == "head.weight":
        return 0.5 * math.sqrt(max(1.0, num_rows / num_columns))
    if name.endswith(".up.weight"):
        return SMALL_GAIN * math.sqrt(max(1.0, num_columns / num_rows))
    return SMALL_GAIN if name.endswith("time_mix.key.weight") else 1.0


def _curves(config: TimeMixConfig, layer: int) -> dict[str, Tensor]:
    """The vectors of a time mix that are neither zeros nor ones, by name."""
    width, layers = config.hidden_size, config.num_hidden_layers
    late = layer / max(1, layers - 1)  # 0 in the first layer, 1 in the last
    early = 1.0 - layer / layers  # 1 in the first layer
    channel = torch.arange(width) / width  # [D], from 0
    linear = torch.linspace(0, 1, width)  # [D], 0 to 1
    within_head = torch.linspace(-1, 1, config.head_dim).repeat(config.num_attention_heads)
    zigzag = within_head * within_head.abs()
    curves = {
        "shift_mix": torch.stack([1 - channel ** (p * early) for p in SHIFT_POWERS]),
        "k_k": 0.71 - 0.1 * (linear - 0.5),
        "k_a": torch.full((width,), 1.02),
        "r_k": torch.full((config.num_attention_heads, config.head_dim), -0.04),
        "group_norm.weight": torch.full((width,), ((1 + layer) / layers) ** 0.7),
        "decay.up.bias": -5.5 + 6 * linear ** (1 + late**0.3) + 2.5 * zigzag,
        "rate.up.bias": -0.19 + 0.3 * zigzag + 0.4 * (linear - 0.5),
        "value_mix.up.bias": 0.73 - 0.4 * (linear - 0.5),
    }
    shapes = time_mix_shapes(config, layer)
    curves["shift_mix"] = curves["shift_mix"][: shapes["shift_mix"][0]]
    return {name: curve for name, curve in curves.items() if name in shapes}


# -------------------------------------------------------------------------------------------------
# A block is ``x + time_mix(time_norm(x))``, then ``x + channel_mix(channel_norm(x))``, with
# layer norms. Both mixes see the token before through a token shift: input c is
# ``x + (x_before - x) * mix_c``. Layer 0's values reach the later layers of the same token
# (`v_first`). Equations: arXiv 2503.14456, section 3 and appendix.


class ChannelMix(nn.Module):
    """``relu(x_k W_key)^2 W_value``."""

    def __init__(self, config: Rwkv7Config) -> None:
        super().__init__()
        self.shift_mix = nn.Parameter(torch.empty(config.hidden_size))
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        inner = self.key(torch.lerp(x, before, self.shift_mix)).relu().square()
        y: Tensor = self.value(inner)
        return y


class Block(nn.Module):
    """One layer; ``chunk`` and ``step`` differ in the axis T and in the recurrence."""

    def __init__(self, config: Rwkv7Config, layer: int) -> None:
        super().__init__()
        self.time_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.time_mix = TimeMix(config, layer)
        self.channel_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.channel_mix = ChannelMix(config)

    def chunk(
        self, x: Tensor, state: State, v_first: Tensor | None
    ) -> tuple[Tensor, State, Tensor]:
        """[B, T, D]."""
        h = self.time_norm(x)
        before = shifted(h, state["time_shift"])
        y, s, v_first = self.time_mix(h, before, v_first, state["S"], chunk)
        x = x + y
        u = self.channel_norm(x)
        x = x + self.channel_mix(u, shifted(u, state["channel_shift"]))
        return x, _state(s, h[:, -1], u[:, -1]), v_first

    def step(self, x: Tensor, state: State, v_first: Tensor | None) -> tuple[Tensor, State, Tensor]:
        """[B, D]."""
        h = self.time_norm(x)
        before = state["time_shift"].to(x.dtype)
        y, s, v_first = self.time_mix(h, before, v_first, state["S"], step)
        x = x + y
        u = self.channel_norm(x)
        x = x + self.channel_mix(u, state["channel_shift"].to(x.dtype))
        return x, _state(s, h, u), v_first


class Rwkv7(Network):
    """See `model.architectures.network.Network`. Positions play no part."""

    config: Rwkv7Config

    def __init__(self, config: Rwkv7Config) -> None:
        super().__init__()
        self.config = config
        width, layers = config.hidden_size, range(config.num_hidden_layers)
        self.embedding = nn.Embedding(config.vocab_size, width)
        norm = nn.LayerNorm(width, config.norm_eps) if config.embedding_norm else nn.Identity()
        self.embedding_norm = norm
        self.blocks = nn.ModuleList(Block(config, layer) for layer in layers)
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.head = nn.Linear(width, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight

    def init_weights(self, generator: torch.Generator) -> None:
        """See `initial_weights`."""
        self.load_state_dict(initial_weights(self.config, generator))

    def hidden_chunk(
        self, tokens: Tensor, state: ModelState, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, ModelState]:
        """See `Network`."""
        return self._run(tokens, state, Block.chunk)

    def hidden_step(
        self, tokens: Tensor, state: ModelState, position: Tensor
    ) -> tuple[Tensor, ModelState]:
        """See `Network`."""
        return self._run(tokens, state, Block.step)

    def _run(
        self,
        tokens: Tensor,
        state: ModelState,
        form: Callable[[Block, Tensor, State, Tensor | None], tuple[Tensor, State, Tensor]],
    ) -> tuple[Tensor, ModelState]:
        x, v_first, new_state = self.embedding_norm(self.embedding(tokens)), None, []
        for block, layer_state in zip(self.blocks, state, strict=True):
            assert isinstance(block, Block), block
            x, layer_state, v_first = form(block, x, layer_state, v_first)
            new_state.append(layer_state)
        return self.norm(x), tuple(new_state)


def _state(s: Tensor, time_row: Tensor, channel_row: Tensor) -> State:
    return {"S": s, "time_shift": time_row.float(), "channel_shift": channel_row.float()}


# -------------------------------------------------------------------------------------------------
# ARWKV. A block is ``x + time_mix(norm(x))``, then ``x + mlp(norm(x))``, with RMS norms. Layer 0's
# values reach the later layers of the same token (`v_first`).


class Arwkv7(Decoder):
    """See `model.architectures.network.Network`. Positions play no part."""

    config: Arwkv7Config

    def __init__(self, config: Arwkv7Config) -> None:
        mixers = [TimeMix(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, mixers, config.norm_eps, config.tied)

    def init_weights(self, generator: torch.Generator) -> None:
        """See `Decoder`; time mixes as in `Rwkv7`."""
        super().init_weights(generator)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, DecoderBlock), block
            block.mixer.load_state_dict(initial_time_mix(self.config, layer, generator))

    def hidden_chunk(
        self, tokens: Tensor, state: ModelState, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, ModelState]:
        """See `Network`."""
        run = chunk if tokens.shape[1] > 1 else _step
        x, v_first, after = self.embedding(tokens), None, []
        for block, layer in zip(self.blocks, state, strict=True):
            assert isinstance(block, DecoderBlock), block
            h = block.mixer_norm(x).to(x.dtype)  # autocast rounds it, but not the token shift
            before = shifted(h, layer["time_shift"])
            y, s, v_first = block.mixer(h, before, v_first, layer["S"], run)
            x = block.rest(x + y)
            after.append({"S": s, "time_shift": h[:, -1].float()})
        return self.norm(x), tuple(after)


def _step(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """`chunk` of one token."""
    one = Inputs(*(tensor.squeeze(1) for tensor in inputs))
    y, state = step(one, state)
    return y.unsqueeze(1), state
