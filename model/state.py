"""The layout of a session's state: one contiguous block of bytes, known from the config.

Layer by layer, tensor by tensor in the order of `Config.layer_states`, each
starting at a multiple of `ALIGNMENT` bytes. Sums are in the config's `state_dtype`. A copy of the
block is a fork, a snapshot or a hibernated session, on any backend.

The tensors of a bounded past lie behind all others, in groups of `POSITION_BLOCK` positions that
have what every attention layer keeps of these. So the part of a block that a text of n tokens uses
is its beginning, `StateLayout.used_bytes` long, and the same for any bound; the rest is zeros.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from model.architectures.config import Config, with_state_dtype
from model.tensor_spec import POSITION_BLOCK, DType, TensorSpec, numpy_dtype

ALIGNMENT = 64


@dataclass(frozen=True)
class Field:
    """One tensor of one layer and where it starts in the block, in bytes.

    ``stride`` is from one index of axis 0 to the next; 0 where the tensor is contiguous.
    ``computed`` is the dtype of a step's arithmetic, ``spec`` has that in the block.
    """

    layer: int
    name: str
    spec: TensorSpec
    offset: int
    stride: int = dataclasses.field(default=0, repr=False)
    computed: DType = dataclasses.field(default="float32", repr=False)


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
                stored = _stored(spec, config)
                fields.append(Field(layer, name, stored, fixed_bytes, computed=spec.dtype))
                fixed_bytes += _aligned(stored.num_bytes)
        past = [(layer, name, spec) for layer, name, spec in tensors if spec.per_position]
        num_groups = past[0][2].shape[0] if past else 0
        group_bytes = sum(_aligned(spec.num_bytes // num_groups) for _, _, spec in past)
        offset = fixed_bytes
        for layer, name, spec in past:
            assert spec.shape[0] == num_groups, (layer, name, spec)
            fields.append(Field(layer, name, spec, offset, group_bytes, spec.dtype))
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

        Blocks may be cut after a group; tensors of the past then have as many groups. Numbers in
        bfloat16 are their bits, uint16.
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
            tensor = part.view(numpy_dtype(field.spec.dtype)).reshape(len(blocks), *shape)
            assert np.may_share_memory(tensor, blocks), field
            layers[field.layer][field.name] = tensor
        return tuple(layers)

    def is_finite(self, block: memoryview) -> bool:
        """Whether every number of a state is finite. ``block``: what it uses of its bytes."""
        layers = self.views(np.frombuffer(block, np.uint8)[None])
        return all(
            _all_finite(layers[field.layer][field.name], field.spec.dtype) for field in self.fields
        )


def _stored(spec: TensorSpec, config: Config) -> TensorSpec:
    """``spec`` as the block has it."""
    if spec.is_sum and config.state_dtype == "bfloat16":
        return replace(spec, dtype="bfloat16")
    return spec


def _all_finite(tensor: npt.NDArray[Any], dtype: DType) -> bool:
    if dtype == "bfloat16":
        return bool((tensor & 0x7F80 != 0x7F80).all())
    return bool(np.isfinite(tensor).all())


def stored_block(block: npt.NDArray[np.uint8], config: Config) -> npt.NDArray[np.uint8]:
    """``block`` [num_bytes], whose sums are as computed, in the config's `state_dtype`.

    Rounded to the nearest, ties to even: only a state that comes from elsewhere is.
    """
    if config.state_dtype == "float32":
        return block
    layout, wide = StateLayout.of(config), StateLayout.of(with_state_dtype(config, "float32"))
    stored = np.zeros(layout.num_bytes, np.uint8)
    targets, sources = layout.views(stored[None]), wide.views(block[None])
    for field in layout.fields:
        values, target = sources[field.layer][field.name], targets[field.layer][field.name]
        target[...] = to_bfloat16(values) if field.spec.dtype == "bfloat16" else values
    return stored


def to_bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of finite ``values``, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The numbers that these bits are, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def kv_cache_bytes_per_token(config: Config) -> int:
    """What softmax attention of the same shape caches for each token: K and V of all layers.

    In 16 bits, as servers keep such caches. Heads that share keys and values count once.
    """
    heads: int = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return 2 * config.num_hidden_layers * heads * config.head_dim * 2
