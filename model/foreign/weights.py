"""Tensors by foreign key, of which each must be taken, and none may be missing."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from model.checkpoint import CheckpointError


class Weights:
    """The tensors that are left. A reader takes what it knows; `refuse_unknown` names the rest."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._left = dict(tensors)

    def take(self, *names: str) -> Tensor:
        """The one tensor that has one of these names, which are historical variants of one key."""
        found = [name for name in names if name in self._left]
        if not found:
            raise CheckpointError(f"the weights lack key {' or '.join(map(repr, names))}")
        return self._left.pop(found[0])

    def has(self, name: str) -> bool:
        """Whether ``name`` is left."""
        return name in self._left

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor that stays."""
        if name not in self._left:
            raise CheckpointError(f"the weights lack key {name!r}")
        return self._left[name].shape

    def drop(self, pattern: str) -> None:
        """Leaves out the buffers whose whole key matches: tables that a config implies."""
        for name in [name for name in self._left if re.fullmatch(pattern, name)]:
            del self._left[name]

    def without_prefix(self, prefix: str) -> None:
        """Takes ``prefix`` off the keys that have it."""
        self._left = {name.removeprefix(prefix): tensor for name, tensor in self._left.items()}

    def head(self, tied: bool, embedding: Tensor) -> dict[str, Tensor]:
        """``head.weight`` where it is not ``tied``; a tied one may be there if it is the same."""
        if not tied:
            return {"head.weight": self.take("lm_head.weight")}
        if self.has("lm_head.weight") and not torch.equal(self.take("lm_head.weight"), embedding):
            raise CheckpointError(
                "lm_head.weight is not the embedding, though tie_word_embeddings is true"
            )
        return {}

    def refuse_unknown(self) -> None:
        """Raises `CheckpointError` for a key that no reader took."""
        if self._left:
            raise CheckpointError(
                f"the weights have an unknown key {min(self._left)!r} ({len(self._left)} in all)"
            )


def repeat_heads(tensor: Tensor, num_heads: int, groups: int) -> Tensor:
    """Rows [heads * dim, ...] with each head ``groups`` times: grouped keys and values, expanded.

    ``num_heads`` counts those before the expansion.
    """
    if tensor.shape[0] % num_heads:
        raise CheckpointError(f"{tensor.shape[0]} rows do not divide into {num_heads} heads")
    heads: Tensor = tensor.unflatten(0, (num_heads, -1))
    return heads.repeat_interleave(groups, dim=0).flatten(0, 1)
