"""GGUF files in which the rows of a head of q and k lie in pairs that turn together.

Row ``2 i + s`` is row ``s F / 2 + i`` of the original, for F rows of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from model.architectures.hybrid import BoundedConfig
from model.weights import Array, WrappedWeights
from model.weights.gguf_file import GgufFile

#: Rows of a tensor, from one to before another.
Read = Callable[[str, int, int | None], Array]


class PairedRows(WrappedWeights):
    """The tensors with the rows of q and k in the order of the original."""

    def __init__(self, file: GgufFile, config: BoundedConfig) -> None:
        super().__init__(file)
        half = config.head_dim // 2
        pairs = np.arange(2 * half).reshape(half, 2).T.ravel()
        self._orders: Mapping[str, npt.NDArray[Any]] = {
            f"attn_{name}": (np.arange(num)[:, None] * config.head_dim + pairs).ravel()
            for name, num in (("q", config.num_attention_heads), ("k", config.num_key_value_heads))
        }

    def __getitem__(self, name: str) -> Array:
        order = self._order_of(name)
        tensor = self._base[name]
        return tensor if order is None else tensor[order]

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        """See `StoredWeights`."""
        return self._in_order(self._base.rows, name, begin, end)

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        """See `StoredWeights`; a row's numbers stay in their order."""
        return self._in_order(self._base.blocks, name, begin, end)

    def block_kind(self, name: str) -> str | None:
        return self._base.block_kind(name)

    def _order_of(self, name: str) -> npt.NDArray[Any] | None:
        return self._orders.get(name.split(".")[2]) if name.startswith("blk.") else None

    def _in_order(self, read: Read, name: str, begin: int, end: int | None) -> Array:
        """The rows of the heads around them are read, and of these those that are asked for."""
        order = self._order_of(name)
        if order is None:
            return read(name, begin, end)
        order = order[begin:end]
        if not len(order):
            return read(name, 0, 0)
        first = int(order.min())
        rows: Array = read(name, first, int(order.max()) + 1)[order - first]
        return rows
