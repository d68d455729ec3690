"""ARWKV in torch: the readable reference of the architecture.

A block is ``x + time_mix(norm(x))``, then ``x + mlp(norm(x))``, with RMS norms. Layer 0's values
reach the later layers of the same token (`v_first`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.architectures.decoder import Decoder, DecoderBlock
from model.architectures.network import Losses, ModelState
from model.families.arwkv7.config import Arwkv7Config
from model.families.rwkv7 import network as rwkv7_network
from model.families.rwkv7.network import TimeMix, initial_time_mix, shifted


class Arwkv7(Decoder):
    """See `model.architectures.network.Network`. Positions play no part."""

    config: Arwkv7Config

    def __init__(self, config: Arwkv7Config) -> None:
        mixers = [TimeMix(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, mixers, config.norm_eps, config.tied)

    def init_weights(self, generator: torch.Generator) -> None:
        """See `Decoder`; time mixes as in `model.families.rwkv7.network`."""
        super().init_weights(generator)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, DecoderBlock), block
            block.mixer.load_state_dict(initial_time_mix(self.config, layer, generator))

    def hidden_chunk(
        self, tokens: Tensor, state: ModelState, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, ModelState]:
        """See `Network`."""
        run = rwkv7_network.chunk if tokens.shape[1] > 1 else _step
        x, v_first, after = self.embedding(tokens), None, []
        for block, layer in zip(self.blocks, state, strict=True):
            assert isinstance(block, DecoderBlock), block
            h = block.mixer_norm(x).to(x.dtype)  # autocast rounds it, but not the token shift
            before = shifted(h, layer["time_shift"])
            y, s, v_first = block.mixer(h, before, v_first, layer["S"], run)
            x = block.rest(x + y)
            after.append({"S": s, "time_shift": h[:, -1].float()})
        return self.norm(x), tuple(after)


def _step(inputs: rwkv7_network.Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """`recurrence.chunk` of one token."""
    one = rwkv7_network.Inputs(*(tensor.squeeze(1) for tensor in inputs))
    y, state = rwkv7_network.step(one, state)
    return y.unsqueeze(1), state
