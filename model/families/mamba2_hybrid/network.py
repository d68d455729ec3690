"""Hybrids over Mamba-2 as published, dense.

They are ``granitemoehybrid``, ``nemotron_h`` and ``falcon_h1`` of transformers.

The mixers are those of `model.families.mamba` and of `model.architectures.decoder`, whose
queries and keys have no norms, and positions only where the config has a ``rotary_dim``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.decoder import BoundedAttention, Decoder, Mixer
from model.architectures.network import State
from model.families.mamba.network import Mamba2Mixer
from model.families.mamba2_hybrid.config import Mamba2HybridConfig


class Mamba2Hybrid(Decoder):
    """See `model.architectures.network.Network`."""

    def __init__(self, config: Mamba2HybridConfig) -> None:
        kinds = zip(config.is_attention, config.is_mamba, strict=True)
        mixers = [_mixer(config, is_attention, is_mamba) for is_attention, is_mamba in kinds]
        super().__init__(config, mixers, config.norm_eps, config.tied)


def _mixer(config: Mamba2HybridConfig, is_attention: bool, is_mamba: bool) -> Mixer:
    if is_attention and is_mamba:
        return ParallelMixers(config)
    if is_attention:
        return _attention(config)
    return Mamba2Mixer(config.mamba) if is_mamba else SquaredReluMlp(config)


def _attention(config: Mamba2HybridConfig) -> BoundedAttention:
    return BoundedAttention.of(
        config, rotary_dim=config.rotary_dim, score_scale=config.attention_scale
    )


class ParallelMixers(Mixer):
    """Attention and a Mamba-2 of the same input, added up. The state is that of both."""

    def __init__(self, config: Mamba2HybridConfig) -> None:
        super().__init__()
        self.attention = _attention(config)
        self.mamba = Mamba2Mixer(config.mamba)

    def init_weights(self, generator: torch.Generator) -> None:
        """See `Mamba2Mixer.init_weights`."""
        self.mamba.init_weights(generator)

    def forward(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        """See `Mixer`."""
        y, past = self.attention(x, state, position)
        z, sums = self.mamba(x, state, position)
        return y + z, past | sums


class SquaredReluMlp(Mixer):
    """``relu(x W_up)^2 W_down`` (So et al. 2021, "Primer", section 3.2) in the place of a mixer."""

    def __init__(self, config: Mamba2HybridConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        """See `Mixer`; there is no state."""
        return self.down(F.relu(self.up(x)).square()), state
