"""Hybrids over Mamba-2 as published (transformers' ``granitemoehybrid``), dense.

The mixers are those of `model.families.mamba` and of `model.architectures.bounded_attention`, whose
queries and keys have no norms, and positions only where the config has a ``rotary_dim``.
"""

from __future__ import annotations

from model.architectures.bounded_attention import BoundedAttention
from model.architectures.decoder import Decoder, Mixer
from model.families.mamba.network import Mamba2Mixer
from model.families.mamba2_hybrid.config import Mamba2HybridConfig


class Mamba2Hybrid(Decoder):
    """See `model.architectures.network.Network`."""

    def __init__(self, config: Mamba2HybridConfig) -> None:
        mixers = [
            _attention(config) if is_attention else Mamba2Mixer(config.mamba)
            for is_attention in config.is_attention
        ]
        super().__init__(config, mixers, config.norm_eps, config.tied)


def _attention(config: Mamba2HybridConfig) -> Mixer:
    return BoundedAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        rotary_dim=config.rotary_dim,
        rope_theta=config.rope_theta,
        eps=config.norm_eps,
        context=config.context,
        qk_norm=config.qk_norm,
        score_scale=config.attention_scale,
    )
