"""Checkpoints whose matrices are int4, rounded to the nearest or calibrated with a text.

The matrices are those that the native runtime holds in int4. A matrix has its scales next to it,
under its name and ``.scale`` (`model.weights.int4`); tables are int8, as the runtime holds them. A
matrix of odd width stays as it is. The config states all this (`model.architectures.config`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from model.architectures.config import QUANTIZATION, stated_quantization
from model.checkpoint import Checkpoint
from model.checkpoint_files import CONFIG
from model.native.runtime import INT4_FILES, INT8_TABLES, Runtime
from model.quantization.quantize import Array, finite, quantize_rows, save_tensors, unrounded
from model.weights import SCALE, CheckpointError, StoredWeights, WrappedWeights, shape_in
from model.weights.int4 import Int4, rounded


def save_int4(
    folder: Path, checkpoint: Checkpoint, text: Path | None = None, threads: int = 1
) -> None:
    """Writes the three files into ``folder``, which must not be the one that is read.

    With a ``text`` the rounding is calibrated (`model.quantization.calibration`), which takes torch
    and ``threads``. Raises `CheckpointError` for weights that are not finite or of four bits,
    `NativeError` for a model that the native runtime does not cover, and `DataError` for a text
    that cannot be used.
    """
    matrices = int4_of(checkpoint, text, threads)
    save_tensors(folder, checkpoint, dict(_tensors(checkpoint, matrices)))
    values = {
        **checkpoint.config.to_dict(),
        QUANTIZATION: stated_quantization(text.name if text else None),
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def int4_of(checkpoint: Checkpoint, text: Path | None, threads: int) -> Mapping[str, Int4]:
    """What becomes int4, by name; see `save_int4`."""
    weights = checkpoint.weights
    if isinstance(weights, StoredWeights) and weights.stored_dtype in INT4_FILES:
        raise CheckpointError(f"the weights are {weights.stored_dtype} already")
    for name in weights:
        finite(checkpoint, name)
    numbers = _Numbers(weights) if isinstance(weights, StoredWeights) else weights
    held = Runtime(checkpoint.config, numbers, "int4").int4_names
    names = [name for name in held if shape_in(weights, name)[1] % 2 == 0]
    if text is None:
        return {name: rounded(finite(checkpoint, name)) for name in names}
    from model.quantization.calibration import calibrated

    return calibrated(checkpoint, names, text, threads)


class _Numbers(WrappedWeights):
    """Those of a file, without its blocks: a runtime of int4 rounds them."""

    @property
    def stored_dtype(self) -> str:
        return "float32"


def _tensors(checkpoint: Checkpoint, matrices: Mapping[str, Int4]) -> Iterator[tuple[str, Array]]:
    for name in checkpoint.weights:
        if name in matrices:
            yield name, matrices[name].packed()
            yield name + SCALE, matrices[name].scales
        elif name in INT8_TABLES:
            rows = quantize_rows(finite(checkpoint, name))
            yield from zip((name, name + SCALE), rows, strict=True)
        else:
            yield name, unrounded(finite(checkpoint, name))
