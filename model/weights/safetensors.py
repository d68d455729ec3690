"""Weights in safetensors files, mapped into memory: what is 32 bits wide is not copied.

A file is 8 bytes with the length of a JSON header, the header (name -> dtype,
shape, place) and the tensors' bytes. The library checks a file when it is
opened, but gives numpy no bfloat16, so the bytes are read here. A matrix of int8 with a
scale per row next to it, or of int4 with one for each 32 numbers (`model.quantization`), comes out
as their product.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from model.files import open_file
from model.tensor_spec import Shape
from model.weights import (
    SCALE,
    Array,
    CheckpointError,
    MappedWeights,
    decoded,
    most_common_dtype,
    release_pages,
)
from model.weights.int4 import num_groups, unpacked

#: dtypes of a file; floating point comes out as float32, BF16 and all.
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "BOOL": "?",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
}


@dataclass(frozen=True)
class _Entry:
    """Where a tensor is; ``start`` counts bytes of the file."""

    path: Path
    bytes: mmap.mmap
    dtype: str
    shape: Shape
    start: int


class WeightFiles(MappedWeights["_Entry"]):
    """The tensors of safetensors files. Arrays are read-only where they share a file's memory."""

    def __init__(self, paths: list[Path]) -> None:
        """Raises `CheckpointError` for a file that is missing or damaged."""
        self._tensors: dict[str, _Entry] = {}
        for path in paths:
            self._tensors.update(_entries(path))
        self._scales = _take_scales(self._tensors)

    def release(self) -> None:
        for mapped in {id(entry.bytes): entry.bytes for entry in self._tensors.values()}.values():
            release_pages(mapped)

    def _rows(self, name: str, rows: slice) -> Array:
        values = self._read(name, self._tensors[name], rows)
        if name not in self._scales:
            return values
        scale = self._read(name + SCALE, self._scales[name], rows)
        if self._is_int4(name):
            return unpacked(values, scale)
        return values.astype(np.float32) * scale[:, None]

    def _read(self, name: str, entry: _Entry, rows: slice) -> Array:
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"{entry.path}: {name} has the unknown dtype {entry.dtype}")
        count = math.prod(entry.shape)
        raw = np.frombuffer(entry.bytes, dtype, count, entry.start).reshape(entry.shape)
        return decoded(raw[rows] if entry.shape else raw, entry.dtype)

    def shape(self, name: str) -> Shape:
        shape = self._tensors[name].shape
        return (shape[0], 2 * shape[1]) if self._is_int4(name) else shape

    @property
    def stored_dtype(self) -> str:
        if any(map(self._is_int4, self._tensors)):
            return "int4"
        return most_common_dtype((e.dtype, e.shape) for e in self._tensors.values())

    def dtype_of(self, name: str) -> str:
        if self._is_int4(name):
            return "int4"
        return most_common_dtype([(self._tensors[name].dtype, ())])

    def _is_int4(self, name: str) -> bool:
        return name in self._scales and self._tensors[name].dtype == "U8"

    @property
    def is_quantized(self) -> bool:
        return bool(self._scales)

    def is_float(self, name: str) -> bool:
        return name in self._scales or "F" in self._tensors[name].dtype


def _take_scales(entries: dict[str, _Entry]) -> dict[str, _Entry]:
    """Takes the scales of int8 and int4 matrices out of ``entries``, by the matrices' names."""
    kinds = ("I8", "U8")
    quantized = [n for n, e in entries.items() if e.dtype in kinds and n + SCALE in entries]
    scales = {name: entries.pop(name + SCALE) for name in quantized}
    for name, scale in scales.items():
        shape, wanted = entries[name].shape, ("F32", *entries[name].shape[:1])
        if entries[name].dtype == "U8" and len(shape) == 2:
            wanted = ("F16", shape[0], num_groups(2 * shape[1]))
        if len(shape) != 2 or (scale.dtype, *scale.shape) != wanted:
            raise CheckpointError(
                f"{scale.path}: {name}{SCALE} is {scale.dtype} {list(scale.shape)},"
                f" wanted {wanted[0]} {list(wanted[1:])} for {name} {list(shape)}"
            )
    return scales


def _entries(path: Path) -> Iterator[tuple[str, _Entry]]:
    try:
        # First: `safe_open` waits for a pipe, and calls what may not be read a missing file.
        with open_file(path) as file, safe_open(path, "numpy"):  # refuses what is not whole
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from error
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    for name, fields in header.items():
        start = 8 + length + fields["data_offsets"][0]
        yield name, _Entry(path, data, fields["dtype"], tuple(fields["shape"]), start)
