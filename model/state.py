"""The layout of a session's state: one contiguous block of bytes, known from the config.

Layer by layer, tensor by tensor in the order of `Config.layer_states`, each
starting at a multiple of `ALIGNMENT` bytes. A copy of the block is a fork, a
snapshot or a hibernated session, on any backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from model.architectures.config import Config
from model.tensor_spec import TensorSpec

ALIGNMENT = 64


@dataclass(frozen=True)
class Field:
    """One tensor of one layer and where it starts in the block, in bytes."""

    layer: int
    name: str
    spec: TensorSpec
    offset: int


@dataclass(frozen=True)
class StateLayout:
    """Where each tensor lies in a block of ``num_bytes``."""

    fields: tuple[Field, ...]
    num_layers: int
    num_bytes: int

    @classmethod
    def of(cls, config: Config) -> StateLayout:
        """Raises `ConfigError` for a model whose state grows."""
        fields, offset = [], 0
        for layer, tensors in enumerate(config.layer_states()):
            for name, spec in tensors.items():
                fields.append(Field(layer, name, spec, offset))
                offset += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields), config.num_hidden_layers, offset)

    def views(self, blocks: npt.NDArray[np.uint8]) -> tuple[dict[str, npt.NDArray[Any]], ...]:
        """Each layer's tensors [B, *shape] inside ``blocks`` [B, num_bytes], sharing its memory."""
        assert blocks.dtype == np.uint8 and blocks.shape[1] == self.num_bytes, blocks.shape
        layers: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(self.num_layers)]
        for field in self.fields:
            part = blocks[:, field.offset : field.offset + field.spec.num_bytes]
            tensor = part.view(field.spec.dtype).reshape(len(blocks), *field.spec.shape)
            layers[field.layer][field.name] = tensor
        return tuple(layers)

    def is_finite(self, block: memoryview) -> bool:
        """Whether every number of a state is finite. ``block``: its bytes, [num_bytes]."""
        layers = self.views(np.frombuffer(block, np.uint8)[None])
        tensors = (tensor for layer in layers for tensor in layer.values())
        return all(bool(np.isfinite(tensor).all()) for tensor in tensors)


def kv_cache_bytes_per_token(config: Config) -> int:
    """What softmax attention of the same shape caches for each token: K and V of all layers.

    In 16 bits, as servers keep such caches, though our own state is float32.
    """
    return 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * 2
