"""Checkpoints whose matrices are int8 or int4, or all of whose weights are bfloat16.

A matrix of int8 has a scale per output row next to it, under its name and
``.scale``: w[i, :] ~ int8[i, :] * scale[i]. `model.weights` multiplies them
when it reads. The scale is max|w[i, :]| / 127 in float32, rounding is to
nearest, ties to even: what the native runtime does when it packs float32 for
int8, so that it packs such a checkpoint to the very same numbers.

The matrices of int4 are those that the native runtime holds in it, rounded to the nearest or
calibrated with a text (`save_int4`). Their scales are under the same names (`model.weights.int4`);
tables are int8, as the runtime holds them. A matrix of odd width stays as it is. The config states
all this (`model.architectures.config`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from model.architectures.config import QUANTIZATION, stated_quantization
from model.checkpoint import Checkpoint, save_chat, save_tokenizer
from model.checkpoint_files import CONFIG
from model.native.runtime import INT4_FILES, INT8_TABLES, Runtime
from model.state import to_bfloat16
from model.weights import SCALE, WEIGHTS, CheckpointError, StoredWeights, WrappedWeights, shape_in
from model.weights.int4 import Int4, rounded

Dtype = Literal["int8", "bfloat16"]
Array = npt.NDArray[Any]
Float = npt.NDArray[np.float32]

#: Ends of the names of the matrices that the native runtime holds in its precision.
_MATRICES = (
    *(".attention.qkv.weight", ".attention.gate.weight", ".attention.out.weight"),
    *(".mlp.up.weight", ".mlp.down.weight"),
)
#: Dtypes of a file by those of numpy: bfloat16 is kept as its bits, int4 as pairs of codes.
_NAMES = {"float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8", "uint16": "BF16"}


def becomes_int8(name: str) -> bool:
    """Whether a weight of this name becomes int8; the small ones do not."""
    return name in INT8_TABLES or name.endswith(_MATRICES)


def quantize_rows(matrix: Float) -> tuple[npt.NDArray[np.int8], Float]:
    """int8 [n, k] and scales [n] float32 of a float32 matrix [n, k]. A row of zeros has scale 0."""
    scale = np.abs(matrix).max(axis=1) / np.float32(127)
    by = np.broadcast_to(scale[:, None], matrix.shape)
    steps = np.divide(matrix, by, out=np.zeros_like(matrix), where=by > 0)
    return np.clip(np.rint(steps), -127, 127).astype(np.int8), scale


def save_quantized(folder: Path, checkpoint: Checkpoint, dtype: Dtype) -> None:
    """Writes the files of a checkpoint, in this project's names, into ``folder``.

    ``int8`` leaves the small weights as they are: those that bfloat16 holds
    exactly as bfloat16, else as float32. Raises `CheckpointError` for a weight
    that is not finite. ``folder`` must not be the one that is read.
    """
    save_tensors(folder, checkpoint, dict(_tensors(checkpoint, dtype)))


def save_tensors(folder: Path, checkpoint: Checkpoint, tensors: Mapping[str, Array]) -> None:
    """Writes the files with these ``tensors``, of dtypes that the format has."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.config.save(folder / CONFIG)
    save_tokenizer(folder, checkpoint.tokenizer)
    save_chat(folder, checkpoint)
    _write(folder / WEIGHTS, tensors)


def finite(checkpoint: Checkpoint, name: str) -> Float:
    """A weight as float32. Raises `CheckpointError` where it is not finite."""
    weight = np.asarray(checkpoint.weights[name], np.float32, order="C")
    if not np.isfinite(weight).all():
        raise CheckpointError(f"{name} is not finite")
    return weight


def unrounded(weight: Float) -> Array:
    """As the bits of bfloat16 where these are the same numbers, else as it is."""
    exact = not (weight.view(np.uint32) & 0xFFFF).any()
    return to_bfloat16(weight) if exact else weight


def _tensors(checkpoint: Checkpoint, dtype: Dtype) -> Iterator[tuple[str, Array]]:
    for name in checkpoint.weights:
        weight = finite(checkpoint, name)
        if dtype == "int8" and becomes_int8(name):
            yield from zip((name, name + SCALE), quantize_rows(weight), strict=True)
        else:
            yield name, to_bfloat16(weight) if dtype == "bfloat16" else unrounded(weight)


def _write(path: Path, tensors: Mapping[str, Array]) -> None:
    """A safetensors file; wider numbers first, as the format wants them aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _NAMES[tensors[name].dtype.name],
            "shape": tensors[name].shape,
            "data_offsets": (start, end),
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            file.write(tensors[name].tobytes())


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
    save_tensors(folder, checkpoint, dict(_int4_tensors(checkpoint, matrices)))
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


def _int4_tensors(
    checkpoint: Checkpoint, matrices: Mapping[str, Int4]
) -> Iterator[tuple[str, Array]]:
    for name in checkpoint.weights:
        if name in matrices:
            yield name, matrices[name].packed()
            yield name + SCALE, matrices[name].scales
        elif name in INT8_TABLES:
            rows = quantize_rows(finite(checkpoint, name))
            yield from zip((name, name + SCALE), rows, strict=True)
        else:
            yield name, unrounded(finite(checkpoint, name))
