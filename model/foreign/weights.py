"""Arrays by foreign key, of which each must be taken, and none may be missing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from model.weights import Array, CheckpointError, shape_in


class Weights:
    """The tensors that are left. A reader takes what it knows; `refuse_unknown` names the rest."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors
        self._left = {name: name for name in tensors}  # as the reader knows it -> as the file does

    def take(self, *names: str) -> Array:
        """The one tensor that has one of these names, which are historical variants of one key."""
        found = [name for name in names if name in self._left]
        if not found:
            raise CheckpointError(f"the weights lack key {' or '.join(map(repr, names))}")
        return self._tensors[self._left.pop(found[0])]

    def take_grouped(self, key: str, num_heads: int, groups: int) -> Array:
        """Rows [heads * dim, ...] with each head ``groups`` times: grouped keys or values.

        ``num_heads`` counts those before the expansion.
        """
        return self._repeated(key, self.take(key), num_heads, groups)

    def join(self, *keys: str) -> Array:
        """The rows of all ``keys`` in one tensor."""
        parts = {key: self.take(key) for key in keys}
        _refuse_misfits(parts)
        return np.concatenate(list(parts.values()))

    def join_qkv(self, pattern: str, num_heads: int, groups: int, grouped: str = "kv") -> Array:
        """The rows of q, k and v in one tensor, the ``grouped`` ones as `take_grouped` gives them.

        ``pattern`` is their key with ``{}`` in the place of the letter.
        """
        parts = {key: self.take(key) for key in (pattern.format(name) for name in "qkv")}
        _refuse_misfits(parts)
        return np.concatenate(
            [
                self._repeated(key, part, num_heads, groups) if name in grouped else part
                for name, (key, part) in zip("qkv", parts.items(), strict=True)
            ]
        )

    def has(self, name: str) -> bool:
        """Whether ``name`` is left."""
        return name in self._left

    def num_rows(self, name: str) -> int:
        """How many rows a tensor has that stays."""
        if name not in self._left:
            raise CheckpointError(f"the weights lack key {name!r}")
        shape = self._tensors[self._left[name]].shape
        if not shape:
            raise CheckpointError(f"{name} is {list(shape)}: it has no rows")
        return int(shape[0])

    def drop(self, pattern: str) -> None:
        """Leaves out the buffers whose whole key matches: tables that a config implies."""
        for name in [name for name in self._left if re.fullmatch(pattern, name)]:
            del self._left[name]

    def without_prefix(self, prefix: str) -> None:
        """Takes ``prefix`` off the keys that have it."""
        self._left = {name.removeprefix(prefix): key for name, key in self._left.items()}

    def head(self, tied: bool, embedding: Array) -> dict[str, Array]:
        """``head.weight`` where it is not ``tied``; a tied one may be there if it is the same."""
        if not tied:
            return {"head.weight": self.take("lm_head.weight")}
        if self.has("lm_head.weight") and not np.array_equal(
            self.take("lm_head.weight"), embedding
        ):
            raise CheckpointError(
                "lm_head.weight is not the embedding, though tie_word_embeddings is true"
            )
        return {}

    def take_all(self) -> Mapping[str, Array]:
        """All tensors, for a reader that checks the keys itself."""
        self._left = {}
        return self._tensors

    def refuse_unknown(self) -> None:
        """Raises `CheckpointError` for a key that no reader took."""
        if self._left:
            raise CheckpointError(
                f"the weights have an unknown key {min(self._left)!r} ({len(self._left)} in all)"
            )

    def _repeated(self, key: str, tensor: Array, num_heads: int, groups: int) -> Array:
        if not tensor.ndim or not len(tensor) or len(tensor) % num_heads:
            raise CheckpointError(
                f"{key} is {list(tensor.shape)}: its rows do not divide into {num_heads} heads"
            )
        # Repeated for each query it is as large as what makes the queries, which is in the file.
        if tensor.size * groups > self._num_numbers:
            raise CheckpointError(f"{key} is {list(tensor.shape)}: not for {groups} queries each")
        heads = tensor.reshape(num_heads, -1, *tensor.shape[1:])
        return np.repeat(heads, groups, axis=0).reshape(-1, *tensor.shape[1:])

    @cached_property
    def _num_numbers(self) -> int:
        return sum(math.prod(shape_in(self._tensors, key)) for key in self._tensors)


def _refuse_misfits(parts: dict[str, Array]) -> None:
    """Raises `CheckpointError` where the rows of the parts, by key, are not of one shape."""
    name, first = next(iter(parts.items()))
    for key, tensor in parts.items():
        if not tensor.ndim or tensor.shape[1:] != first.shape[1:]:
            raise CheckpointError(
                f"{key} is {list(tensor.shape)}: its rows do not fit under those of"
                f" {name}, {list(first.shape)}"
            )
