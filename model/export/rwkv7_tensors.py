"""The weights of an RWKV-7 by the keys, and with the axes, of its published files; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from model.checkpoint import Checkpoint, CheckpointError
from model.families.rwkv7.config import Rwkv7Config
from model.families.rwkv7.read import NATIVE, Names, parts_of
from model.foreign.renamed import Part
from model.weights import Array


def config_of(checkpoint: Checkpoint) -> Rwkv7Config:
    """The config, which is of this family. Raises `CheckpointError` where no format has it."""
    assert isinstance(checkpoint.config, Rwkv7Config), checkpoint.config
    if not checkpoint.config.embedding_norm:
        raise CheckpointError("the embedding is normed already, which no format of RWKV-7 can say")
    return checkpoint.config


def published(checkpoint: Checkpoint, names: Names) -> Iterator[tuple[str, Array]]:
    """The tensors by the keys of ``names``, float32, each read when it is its turn."""
    for ours, part in parts_of(config_of(checkpoint), names).items():
        tensor = np.asarray(checkpoint.weights[ours], np.float32)
        rows = [tensor] if len(part.keys) == 1 else list(tensor)
        for key, row in zip(part.keys, rows, strict=True):
            yield key, _formed(row, part, names)


def refuse_others(form: str, name: str, wanted: float, found: float) -> None:
    """Raises `CheckpointError` where a value is not the one that a format implies."""
    if not math.isclose(found, wanted, rel_tol=1e-6):
        raise CheckpointError(f"{form} implies {name} {wanted:g}, the model has {found:g}")


def _formed(tensor: Array, part: Part, names: Names) -> Array:
    """As the files have it: vectors of a native file, and of a token shift, are [1, 1, D]."""
    if part.form == "transposed":
        return tensor.T
    if part.form == "flat" and (names is NATIVE or len(part.keys) > 1):
        return tensor.reshape(1, 1, -1)
    return tensor
