"""The layout of a session's state: one contiguous block of bytes, known from the config.

Layer by layer, tensor by tensor in the order of `Config.layer_states`, each
starting at a multiple of `ALIGNMENT` bytes. A copy of the block is a fork, a
snapshot or a hibernated session, on any backend.

The tensors of a bounded past lie behind all others, in groups of `POSITION_BLOCK` positions that
have what every attention layer keeps of these. So the part of a block that a text of n tokens uses
is its beginning, `StateLayout.used_bytes` long, and the same for any bound; the rest is zeros.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from model.architectures.config import Config
from model.tensor_spec import POSITION_BLOCK, TensorSpec

ALIGNMENT = 64


@dataclass(frozen=True)
class Field:
    """One tensor of one layer and where it starts in the block, in bytes.

    ``stride`` is from one index of axis 0 to the next; 0 where the tensor is contiguous.
    """

    layer: int
    name: str
    spec: TensorSpec
    offset: int
    stride: int = dataclasses.field(default=0, repr=False)


@dataclass(frozen=True)
class StateLayout:
    """Where each tensor lies in a block of ``num_bytes``.

    ``fixed_bytes`` of it do not depend on the length of the text; behind them are ``num_groups``
    groups of ``group_bytes``, none where the state is constant. Stores have a digest of the repr:
    it says what decides the meaning of the bytes.
    """

    fields: tuple[Field, ...]
    num_layers: int
    num_bytes: int
    fixed_bytes: int = dataclasses.field(repr=False)
    group_bytes: int = dataclasses.field(default=0, repr=False)
    num_groups: int = dataclasses.field(default=0, repr=False)

    @classmethod
    def of(cls, config: Config) -> StateLayout:
        """Raises `ConfigError` for a model whose state grows without a bound."""
        fields: list[Field] = []
        tensors = [
            (layer, name, spec)
            for layer, specs in enumerate(config.layer_states())
            for name, spec in specs.items()
        ]
        fixed_bytes = 0
        for layer, name, spec in tensors:
            if not spec.per_position:
                fields.append(Field(layer, name, spec, fixed_bytes))
                fixed_bytes += _aligned(spec.num_bytes)
        past = [(layer, name, spec) for layer, name, spec in tensors if spec.per_position]
        num_groups = past[0][2].shape[0] if past else 0
        group_bytes = sum(_aligned(spec.num_bytes // num_groups) for _, _, spec in past)
        offset = fixed_bytes
        for layer, name, spec in past:
            assert spec.shape[0] == num_groups, (layer, name, spec)
            fields.append(Field(layer, name, spec, offset, group_bytes))
            offset += _aligned(spec.num_bytes // num_groups)
        num_bytes = fixed_bytes + num_groups * group_bytes
        layers = config.num_hidden_layers
        return cls(tuple(fields), layers, num_bytes, fixed_bytes, group_bytes, num_groups)

    def used_bytes(self, position: int) -> int:
        """Of the beginning of the block that a state of ``position`` tokens uses."""
        num_groups = min(-(-position // POSITION_BLOCK), self.num_groups)
        return self.fixed_bytes + num_groups * self.group_bytes

    def gaps(self) -> npt.NDArray[np.intp]:
        """The bytes of the fixed part that are between tensors, which nothing reads."""
        fields = [field for field in self.fields if not field.stride]
        begins = [0, *(field.offset + field.spec.num_bytes for field in fields)]
        ends = [*(field.offset for field in fields), self.fixed_bytes]
        return np.concatenate(list(map(np.arange, begins, ends)))

    def views(self, blocks: npt.NDArray[np.uint8]) -> tuple[dict[str, npt.NDArray[Any]], ...]:
        """Each layer's tensors [B, *shape] inside ``blocks`` [B, num_bytes], sharing its memory.

        Blocks may be cut after a group; tensors of the past then have as many groups.
        """
        assert blocks.dtype == np.uint8, blocks.dtype
        layers: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(self.num_layers)]
        past = blocks[:, self.fixed_bytes :]
        num_groups = past.shape[1] // self.group_bytes if self.group_bytes else 0
        assert blocks.shape[1] == self.fixed_bytes + num_groups * self.group_bytes, blocks.shape
        for field in self.fields:
            shape, size = field.spec.shape, field.spec.num_bytes
            if field.stride:
                groups = past.reshape(len(blocks), num_groups, self.group_bytes)
                begin, size = field.offset - self.fixed_bytes, size // self.num_groups
                part, shape = groups[..., begin : begin + size], (num_groups, *shape[1:])
            else:
                part = blocks[:, field.offset : field.offset + size]
            tensor = part.view(field.spec.dtype).reshape(len(blocks), *shape)
            assert np.may_share_memory(tensor, blocks), field
            layers[field.layer][field.name] = tensor
        return tuple(layers)

    def is_finite(self, block: memoryview) -> bool:
        """Whether every number of a state is finite. ``block``: what it uses of its bytes."""
        layers = self.views(np.frombuffer(block, np.uint8)[None])
        tensors = (tensor for layer in layers for tensor in layer.values())
        return all(bool(np.isfinite(tensor).all()) for tensor in tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def kv_cache_bytes_per_token(config: Config) -> int:
    """What softmax attention of the same shape caches for each token: K and V of all layers.

    In 16 bits, as servers keep such caches. Heads that share keys and values count once.
    """
    heads: int = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return 2 * config.num_hidden_layers * heads * config.head_dim * 2
