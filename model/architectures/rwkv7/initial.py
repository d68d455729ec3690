"""What training starts an RWKV-7 from: the initial weights of the published models.

From the trainer that made them (RWKV-LM, RWKV-v7/train_temp/src/model.py: the constructors and
``generate_init_weight``). Its own words for the vectors: each is a curve over the channels,
and most of the curves depend on the layer.

- Both mixes add nothing at first: ``output`` of the time mix and ``value`` of the channel mix
  are zero. The low-rank maps add nothing to their biases, since ``down`` is zero.
- Embeddings are tiny (the norm after them makes steps large), the other matrices orthogonal.
- Token shifts look back less in the later layers and in the later channels of a layer.
- Decays range from slow in the first channel to fast in the last, and within each head too.

Symbols: D width, N head size, L layers, l the layer from 0, i the channel from 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from model.architectures.rwkv7.config import Rwkv7Config

#: Exponents of the token shifts, in the order of the rows of ``shift_mix``: r, w, k, v, a, g.
SHIFT_POWERS = (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)
EMBEDDING_RANGE = 1e-4
#: Gain of the key's matrix and of ``up`` of the low-rank maps; other matrices have 1.
SMALL_GAIN = 0.1


def initial_weights(config: Rwkv7Config, generator: torch.Generator) -> dict[str, Tensor]:
    """Every weight of `Rwkv7Config.weight_shapes`, float32 on the CPU."""
    weights: dict[str, Tensor] = {}
    for name, shape in config.weight_shapes().items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        elif len(shape) == 1 or name.endswith(_ZERO):
            weights[name] = torch.zeros(shape)
        elif name == "embedding.weight":
            weights[name] = torch.empty(shape).uniform_(
                -EMBEDDING_RANGE, EMBEDDING_RANGE, generator=generator
            )
        else:
            gain = _gain(name, shape)
            weights[name] = nn.init.orthogonal_(torch.empty(shape), gain, generator=generator)
    for layer in range(config.num_hidden_layers):
        curves = _curves(config, layer)
        weights |= {f"blocks.{layer}.{name}": curve for name, curve in curves.items()}
    return weights


#: Matrices that are zero.
_ZERO = ("time_mix.output.weight", "channel_mix.value.weight", ".down.weight")


def _gain(name: str, shape: tuple[int, ...]) -> float:
    """Of an orthogonal matrix [out, in]."""
    num_rows, num_columns = shape
    if name == "head.weight":
        return 0.5 * math.sqrt(max(1.0, num_rows / num_columns))
    if name.endswith(".up.weight"):
        return SMALL_GAIN * math.sqrt(max(1.0, num_columns / num_rows))
    return SMALL_GAIN if name.endswith("time_mix.key.weight") else 1.0


def _curves(config: Rwkv7Config, layer: int) -> dict[str, Tensor]:
    """The vectors of a block that are neither zeros nor ones, by name."""
    width, layers = config.hidden_size, config.num_hidden_layers
    late = layer / max(1, layers - 1)  # 0 in the first layer, 1 in the last
    early = 1.0 - layer / layers  # 1 in the first layer
    channel = torch.arange(width) / width  # [D], from 0
    linear = torch.linspace(0, 1, width)  # [D], 0 to 1
    within_head = torch.linspace(-1, 1, config.head_dim).repeat(config.num_attention_heads)
    zigzag = within_head * within_head.abs()
    curves = {
        "time_mix.shift_mix": torch.stack([1 - channel ** (p * early) for p in SHIFT_POWERS]),
        "channel_mix.shift_mix": 1 - channel**early**4,
        "time_mix.k_k": 0.71 - 0.1 * (linear - 0.5),
        "time_mix.k_a": torch.full((width,), 1.02),
        "time_mix.r_k": torch.full((config.num_attention_heads, config.head_dim), -0.04),
        "time_mix.group_norm.weight": torch.full((width,), ((1 + layer) / layers) ** 0.7),
        "time_mix.decay.up.bias": -5.5 + 6 * linear ** (1 + late**0.3) + 2.5 * zigzag,
        "time_mix.rate.up.bias": -0.19 + 0.3 * zigzag + 0.4 * (linear - 0.5),
        "time_mix.value_mix.up.bias": 0.73 - 0.4 * (linear - 0.5),
    }
    if layer == 0:
        del curves["time_mix.value_mix.up.bias"]
    return curves
