"""Our models of the measured sizes: checkpoint folders with random weights. Without torch."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from benchmarks.decode.roofline import Cost, matrix_cost
from benchmarks.decode.shapes import Size, matching_width
from benchmarks.process import make_once
from model.architectures.config import Config
from model.config import ModelConfig
from model.state import StateLayout
from model.weights import num_parameters

#: An MLP narrower than that of `Size` is a multiple of it wide, as vector code likes it.
WIDTH_STEP = 16
#: For each number of S: a decay, a product that is added, and one that is read and added up; an
#: RWKV-7 takes something out of it as well.
OPERATIONS_PER_STATE_NUMBER = {"everstream": 5, "everstream-rwkv7": 7, "everstream-mamba2": 5}


@cache
def config_of(size: Size, attention: str) -> ModelConfig:
    """A model with this attention and about as many parameters as every model of this size."""
    wide = ModelConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        head_dim=size.head_dim,
        intermediate_size=size.intermediate_size,
        attention=attention,
        tie_word_embeddings=False,
    )
    width = matching_width(lambda width: own_parameters(wide, width), size.num_parameters)
    if width >= size.intermediate_size:
        return wide
    return dataclasses.replace(wide, intermediate_size=width // WIDTH_STEP * WIDTH_STEP)


def own_parameters(config: ModelConfig, width: int) -> int:
    """Parameters of our model with a feed-forward layer of ``width``."""
    return num_parameters(dataclasses.replace(config, intermediate_size=width))


def random_weights(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """Weights by their names in a checkpoint, the same every time; norms are one."""
    draw, weights = np.random.default_rng(0), {}
    for name, shape in config.weight_shapes().items():
        if name.endswith(("norm.weight", "norm_weight")):
            weights[name] = np.ones(shape, np.float32)
            continue
        weights[name] = draw.standard_normal(shape, np.float32)
        weights[name] *= 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.1
    return weights


def checkpoint(folder: Path, size: Size, attention: str) -> Path:
    """Writes config and float32 weights into a folder of ``folder``, unless they are there."""
    config = config_of(size, attention)

    def write(path: Path) -> None:
        path.mkdir()
        config.save(path / "config.json")
        save_file(random_weights(config), path / "model.safetensors")

    return make_once(folder / f"{size.name}-{attention}", write)


def step_cost(config: Config, item_bytes: float, rows: int, streams: int) -> Cost:
    """Of ``rows`` tokens in ``streams`` streams: weights, and each stream's state in and out.

    A head that is the embedding is read as one of its own would be.
    """
    layout, operations = StateLayout.of(config), OPERATIONS_PER_STATE_NUMBER[config.model_type]
    state_numbers = sum(math.prod(field.spec.shape) for field in layout.fields if field.name == "S")
    shapes = {"head.weight": (config.vocab_size, config.hidden_size), **config.weight_shapes()}
    return matrix_cost(shapes, item_bytes, rows, streams, "embedding") + Cost(
        2 * layout.num_bytes * streams, operations * state_numbers * rows
    )
