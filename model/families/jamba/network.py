"""Jamba in torch (Lieber et al. 2024, arXiv 2403.19887), dense: ``jamba`` of transformers.

A block is a mixer and a SwiGLU. The mixers are those of `model.families.mamba` and of
`model.architectures.decoder`, whose queries and keys have neither norms nor positions.
"""

from __future__ import annotations

from model.architectures.decoder import BoundedAttention, Decoder, Mixer
from model.families.jamba.config import JambaConfig
from model.families.mamba.network import MambaMixer


class Jamba(Decoder):
    """See `model.architectures.network.Network`."""

    def __init__(self, config: JambaConfig) -> None:
        mixers = [_mixer(config, is_attention) for is_attention in config.is_attention]
        super().__init__(config, mixers, config.norm_eps, config.tied)


def _mixer(config: JambaConfig, is_attention: bool) -> Mixer:
    if is_attention:
        return BoundedAttention.of(config, rotary_dim=0)
    return MambaMixer(config.mamba, norm_weights=True)
