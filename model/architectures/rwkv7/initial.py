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

from model.architectures.rwkv7.config import Rwkv7Config, TimeMixConfig, time_mix_shapes
from model.tensor_spec import Shape

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
