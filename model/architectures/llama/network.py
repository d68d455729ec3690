"""Llama (Touvron et al. 2023, arXiv 2302.13971), and what differs from it by options of attention.

Every layer is `model.architectures.bounded_attention` and a SwiGLU.
"""

from __future__ import annotations

from model.architectures.bounded_attention import BoundedAttention
from model.architectures.decoder import Decoder
from model.architectures.llama.config import LlamaConfig


class Llama(Decoder):
    """See `model.architectures.network.Network`."""

    def __init__(self, config: LlamaConfig) -> None:
        mixers = [_attention(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, mixers, config.norm_eps, config.tied)


def _attention(config: LlamaConfig, layer: int) -> BoundedAttention:
    rotates = layer not in config.unrotated_layers
    return BoundedAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        rotary_dim=config.head_dim if rotates else 0,
        rope_theta=config.rope_theta,
        rope_factors=config.rope_factors if rotates else (),
        eps=config.norm_eps,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        context=config.context,
    )
