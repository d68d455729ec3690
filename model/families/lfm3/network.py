"""LFM3 as published (transformers' ``lfm3``): LFM2 with windows, gates of heads and more norms.

With h the normed input of a layer of attention, and per head one number of W_gate h:

    y = W_out (sigmoid(W_gate h) * attention(h))

All or the last ``window`` tokens are seen, and each of the two kinds of layers has a base of its
rotary positions and a part of the channels that turns. The short convolution is LFM2's. What mixers
and MLPs give is normed before it is added: ``x + norm(mixer(norm(x)))``.
"""

from __future__ import annotations

from model.architectures.decoder import BoundedAttention, Decoder, Mixer
from model.architectures.hybrid import SINKS
from model.families.lfm2.network import ShortConvolution
from model.families.lfm3.config import Lfm3Config


class Lfm3(Decoder):
    """See `model.architectures.network.Network`."""

    def __init__(self, config: Lfm3Config) -> None:
        mixers = [_mixer(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, mixers, config.norm_eps, config.tied, config.post_norms)


def _mixer(config: Lfm3Config, layer: int) -> Mixer:
    is_window = layer in config.window_layers
    if not is_window and layer not in config.attention_layers:
        return ShortConvolution(config)
    rotary_dim = config.window_rotary_dim if is_window else config.rotary_dim
    return BoundedAttention.of(
        config,
        rotary_dim=config.head_dim,
        rope_theta=config.window_rope_theta if is_window else config.rope_theta,
        rope_factors=config.rope_factors(rotary_dim),
        head_gates=config.head_gates,
        context=config.window if is_window else config.context,
        sinks=0 if is_window else SINKS,
    )
