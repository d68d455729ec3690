"""RWKV-7 in torch: the readable reference of the architecture.

A block is ``x + time_mix(time_norm(x))``, then ``x + channel_mix(channel_norm(x))``, with
layer norms. Both mixes see the token before through a token shift: input c is
``x + (x_before - x) * mix_c``. Layer 0's values reach the later layers of the same token
(`v_first`). Equations: arXiv 2503.14456, section 3 and appendix; names as in the published
weights where they have one (k_k, k_a, r_k).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.network import Losses, ModelState, Network, State
from model.architectures.rwkv7 import recurrence
from model.architectures.rwkv7.config import Rwkv7Config
from model.architectures.rwkv7.initial import initial_weights
from model.architectures.rwkv7.recurrence import Inputs, Recurrence

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
        return self.up(x if f is None else f(x))  # type: ignore[no-any-return]


class TimeMix(nn.Module):
    """Token mixing. ``shift_mix`` has the rows r, w, k, v, a, g."""

    def __init__(self, config: Rwkv7Config, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = (config.num_attention_heads, config.head_dim)
        self.shift_mix = nn.Parameter(torch.empty(6, width))
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
        self.gate = LowRank(width, config.gate_rank, bias=False)
        self.group_norm = nn.GroupNorm(config.num_attention_heads, width, config.group_norm_eps)

    def forward(
        self, x: Tensor, before: Tensor, v_first: Tensor | None, s: Tensor, run: Recurrence
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` and the inputs ``before`` it, [..., D]; output, the new S, and layer 0's values."""
        r, w, k, v, a, g = (torch.lerp(x, before, mix) for mix in self.shift_mix)
        gate = self.gate(g, torch.sigmoid)
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
        y = F.layer_norm(y, y.shape[-1:], eps=self.group_norm.eps).flatten(-2)
        y = y * self.group_norm.weight + self.group_norm.bias
        bonus = (r * k * self.r_k).sum(dim=-1, keepdim=True) * values
        y = (y + bonus.flatten(-2)).to(x.dtype) * gate
        return self.output(y), s, v_first

    def _per_head(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, self.heads)
        return heads


class ChannelMix(nn.Module):
    """``relu(x_k W_key)^2 W_value``."""

    def __init__(self, config: Rwkv7Config) -> None:
        super().__init__()
        self.shift_mix = nn.Parameter(torch.empty(config.hidden_size))
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        inner = self.key(torch.lerp(x, before, self.shift_mix)).relu().square()
        return self.value(inner)  # type: ignore[no-any-return]


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
        before = _shifted(h, state["time_shift"])
        y, s, v_first = self.time_mix(h, before, v_first, state["S"], recurrence.chunk)
        x = x + y
        u = self.channel_norm(x)
        x = x + self.channel_mix(u, _shifted(u, state["channel_shift"]))
        return x, _state(s, h[:, -1], u[:, -1]), v_first

    def step(self, x: Tensor, state: State, v_first: Tensor | None) -> tuple[Tensor, State, Tensor]:
        """[B, D]."""
        h = self.time_norm(x)
        before = state["time_shift"].to(x.dtype)
        y, s, v_first = self.time_mix(h, before, v_first, state["S"], recurrence.step)
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
        """See `model.architectures.rwkv7.initial`."""
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


def _shifted(x: Tensor, first: Tensor) -> Tensor:
    """The row before each of ``x`` [B, T, D]; before the first one there is ``first`` [B, D]."""
    return torch.cat([first.to(x.dtype).unsqueeze(1), x[:, :-1]], dim=1)


def _state(s: Tensor, time_row: Tensor, channel_row: Tensor) -> State:
    return {"S": s, "time_shift": time_row.float(), "channel_shift": channel_row.float()}
