"""RWKV-7 in torch: the readable reference of the architecture.

A block is ``x + time_mix(time_norm(x))``, then ``x + channel_mix(channel_norm(x))``, with
layer norms. Both mixes see the token before through a token shift: input c is
``x + (x_before - x) * mix_c``. Layer 0's values reach the later layers of the same token
(`v_first`). Equations: arXiv 2503.14456, section 3 and appendix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.architectures.network import Losses, ModelState, Network, State
from model.architectures.rwkv7 import recurrence
from model.architectures.rwkv7.config import Rwkv7Config
from model.architectures.rwkv7.initial import initial_weights
from model.architectures.rwkv7.time_mix import TimeMix, shifted


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
        before = shifted(h, state["time_shift"])
        y, s, v_first = self.time_mix(h, before, v_first, state["S"], recurrence.chunk)
        x = x + y
        u = self.channel_norm(x)
        x = x + self.channel_mix(u, shifted(u, state["channel_shift"]))
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


def _state(s: Tensor, time_row: Tensor, channel_row: Tensor) -> State:
    return {"S": s, "time_shift": time_row.float(), "channel_shift": channel_row.float()}
