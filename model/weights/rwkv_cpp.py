"""The tensors of a file of rwkv.cpp, memory-mapped: the format of ggml before GGUF.

Six numbers of 32 bits begin it: `MAGIC`, the version, the ids, the width, the layers and the type
of most numbers. Each tensor follows as three numbers (axes, bytes of the name, type), its axes from
the innermost, its name, and its numbers. rwkv.cpp, docs/FILE_FORMAT.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from model.files import open_file
from model.tensor_spec import Shape
from model.weights import (
    Array,
    CheckpointError,
    MappedWeights,
    decoded,
    most_common_dtype,
    release_pages,
)

MAGIC, VERSION = b"fmgg", 101
#: Types of numbers: their names, and numpy's.
_TYPES = {0: ("F32", "<f4"), 1: ("F16", "<f2")}
#: Those of blocks, which rwkv.cpp makes of a file.
_QUANTIZED = "a quantised tensor, which is not supported: convert the model to FP16 or FP32"
_MAX_AXES, _MAX_NAME_BYTES = 4, 256


class Sizes(NamedTuple):
    """What the beginning of a file says."""

    vocab_size: int
    width: int
    num_layers: int


@dataclass(frozen=True)
class _Entry:
    """Where a tensor is; ``start`` counts bytes of the file."""

    type: int
    shape: Shape
    start: int


class RwkvCppFile(MappedWeights[_Entry]):
    """The tensors by name, in numpy's order of axes; ``stated`` are the sizes of the beginning."""

    def __init__(self, path: Path) -> None:
        """Raises `CheckpointError` for a file that is damaged or of another version."""
        self._path = path
        try:
            with open_file(path) as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            magic, version, *sizes, _ = self._numbers(0, 6)
            if magic != int.from_bytes(MAGIC, "little") or version != VERSION:
                raise CheckpointError(f"{path} is not a file of rwkv.cpp of version {VERSION}")
            self.stated = Sizes(*sizes)
            self._tensors: dict[str, _Entry] = {}
            place = 24
            while place < len(self._bytes):
                place = self._read_entry(place)
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: the file is damaged: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error

    def release(self) -> None:
        release_pages(self._bytes)

    @property
    def stored_dtype(self) -> str:
        return most_common_dtype((_TYPES[e.type][0], e.shape) for e in self._tensors.values())

    def _rows(self, name: str, rows: slice) -> Array:
        entry = self._tensors[name]
        dtype, numpy_dtype = _TYPES[entry.type]
        count = math.prod(entry.shape)
        raw = np.frombuffer(self._bytes, numpy_dtype, count, entry.start).reshape(entry.shape)
        return decoded(raw[rows], dtype)

    def _numbers(self, place: int, count: int) -> tuple[int, ...]:
        return struct.unpack_from(f"<{count}I", self._bytes, place)

    def _read_entry(self, place: int) -> int:
        """Reads what describes a tensor; where the next one is."""
        num_axes, num_bytes, type = self._numbers(place, 3)
        if not 1 <= num_axes <= _MAX_AXES or not 1 <= num_bytes <= _MAX_NAME_BYTES:
            raise CheckpointError(f"{self._path}: a tensor has {num_axes} axes: it is damaged")
        shape = self._numbers(place + 12, num_axes)[::-1]
        place += 12 + 4 * num_axes
        name = self._bytes[place : place + num_bytes].decode()
        place += num_bytes
        if type not in _TYPES:
            raise CheckpointError(f"{self._path}: {name!r:.80} is {_QUANTIZED}")
        end = place + math.prod(shape) * np.dtype(_TYPES[type][1]).itemsize
        if end > len(self._bytes) or name in self._tensors:
            raise CheckpointError(f"{self._path}: {name!r:.80} is not whole, or is there twice")
        self._tensors[name] = _Entry(type, shape, place)
        return end
