"""A checkpoint's weights as numpy arrays, from safetensors files, each read when it is asked for.

A file is 8 bytes with the length of a JSON header, the header (name -> dtype,
shape, place) and the tensors' bytes. The library checks a file when it is
opened, but gives numpy no bfloat16, so the bytes are read here. Files are mapped
into memory: what is 32 bits wide already is not copied. A matrix of int8 with a
scale per row next to it (`model.quantization`) comes out as their product.
"""

from __future__ import annotations

import json
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from model.architectures.config import Config
from model.files import FileError, open_file
from model.tensor_spec import Shape

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: A folder's weights are one file, or several that an index names: the first form that is there.
FORMS = ((WEIGHTS, INDEX), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
#: Ends the name of an int8 matrix's scales, [rows] float32.
SCALE = ".scale"

Array = npt.NDArray[Any]
Weights = Mapping[str, Array]

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


#: The names that users know those of floating point and int8 by.
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}


class CheckpointError(FileError):
    """A folder that is no checkpoint of this project. The message names the file and the key."""


@dataclass(frozen=True)
class _Entry:
    """Where a tensor is; ``start`` counts bytes of the file."""

    path: Path
    bytes: mmap.mmap
    dtype: str
    shape: Shape
    start: int


class StoredWeights(Mapping[str, Array], ABC):
    """Tensors in files, each read when it is asked for, as float32 where it is floating point.

    ``name`` is what messages call the files.
    """

    name = WEIGHTS

    @abstractmethod
    def __contains__(self, name: object) -> bool:
        """Unlike that of `Mapping`, without reading the tensor."""

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        """Rows of a tensor. Of a large one a subclass reads no others."""
        return self[name][begin:end]

    def release(self) -> None:
        """Tells the system that what was read of mapped files is not needed for now."""

    @abstractmethod
    def shape(self, name: str) -> Shape:
        """The shape of a tensor, which is not read."""

    @abstractmethod
    def is_float(self, name: str) -> bool:
        """Whether a tensor comes out as floating point; it is not read."""

    @property
    @abstractmethod
    def stored_dtype(self) -> str:
        """The dtype of most of the numbers in the files, such as ``int8``."""

    @property
    def is_quantized(self) -> bool:
        """Whether most of the numbers are in blocks or rows of integers with a scale."""
        return False


class _Shaped(Protocol):
    """Where a tensor is in its file."""

    @property
    def shape(self) -> Shape: ...


Entry = TypeVar("Entry", bound=_Shaped)


class MappedWeights(StoredWeights, Generic[Entry]):
    """Tensors in memory-mapped files, by what ``_tensors`` says of each."""

    _tensors: Mapping[str, Entry]

    @abstractmethod
    def _rows(self, name: str, rows: slice) -> Array:
        """Those of a tensor, read from its file."""

    def __getitem__(self, name: str) -> Array:
        return self._rows(name, slice(None))

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        return self._rows(name, slice(begin, end))

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def shape(self, name: str) -> Shape:
        return self._tensors[name].shape

    def is_float(self, name: str) -> bool:
        return name in self._tensors


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
        return values.astype(np.float32) * scale[:, None]

    def _read(self, name: str, entry: _Entry, rows: slice) -> Array:
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"{entry.path}: {name} has the unknown dtype {entry.dtype}")
        count = math.prod(entry.shape)
        raw = np.frombuffer(entry.bytes, dtype, count, entry.start).reshape(entry.shape)
        return decoded(raw[rows] if entry.shape else raw, entry.dtype)

    @property
    def stored_dtype(self) -> str:
        return most_common_dtype((e.dtype, e.shape) for e in self._tensors.values())

    @property
    def is_quantized(self) -> bool:
        return bool(self._scales)

    def is_float(self, name: str) -> bool:
        return name in self._scales or "F" in self._tensors[name].dtype


def release_pages(mapped: mmap.mmap) -> None:
    """Takes what was read of a file out of the process's memory; it stays mapped."""
    if hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)


def decoded(raw: Array, dtype: str) -> Array:
    """Numbers as a file of ``dtype`` has them, BF16 as uint16, to float32 or their integers."""
    if dtype == "BF16":  # the upper half of a float32
        wide = raw.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return np.require(raw, np.float32 if raw.dtype.kind == "f" else None, "A")


def most_common_dtype(tensors: Iterable[tuple[str, Shape]]) -> str:
    """The name of the dtype that most numbers of the (dtype, shape) pairs have."""
    counts: dict[str, int] = {}
    for dtype, shape in tensors:
        counts[dtype] = counts.get(dtype, 0) + math.prod(shape)
    most = max(counts, key=lambda dtype: counts[dtype])
    return _NAMES.get(most, most)


def file_name(weights: Weights) -> str:
    """What messages call the files of these weights."""
    return weights.name if isinstance(weights, StoredWeights) else WEIGHTS


def shape_in(weights: Weights, name: str) -> Shape:
    """The shape of a tensor, which is not read where it is in a file."""
    return weights.shape(name) if isinstance(weights, StoredWeights) else weights[name].shape


def is_quantized(weights: Weights) -> bool:
    """Whether the files of these weights hold integers with scales."""
    return isinstance(weights, StoredWeights) and weights.is_quantized


def num_parameters(config: Config) -> int:
    """Numbers that training sets; see `Config.fixed_weights` for what it does not."""
    shapes, fixed = config.weight_shapes(), config.fixed_weights()
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in fixed)


def check_weights(config: Config, weights: Weights) -> None:
    """Raises `CheckpointError` where a key is missing, unknown, or of another shape or kind."""
    file = file_name(weights)
    # Before anything is made for each layer: the number is the config's word alone.
    if config.num_hidden_layers > len(weights):
        raise CheckpointError(
            f"{file} has {len(weights)} keys, too few for {config.num_hidden_layers} layers"
        )
    wanted = config.weight_shapes()
    for kind, names in (
        ("lacks", wanted.keys() - weights.keys()),
        ("has an unknown", weights.keys() - wanted.keys()),
    ):
        if names:
            raise CheckpointError(f"{file} {kind} key {min(names)!r} ({len(names)} in all)")
    for name, shape in wanted.items():
        found, is_float = _shape_and_kind(weights, name)
        if found != shape:
            raise CheckpointError(f"{file}: {name} is {list(found)}, wanted {list(shape)}")
        if not is_float:
            raise CheckpointError(f"{file}: {name} is of integers and has no {name}{SCALE}")


def _shape_and_kind(weights: Weights, name: str) -> tuple[Shape, bool]:
    """The shape, and whether it is floating point, without reading a file's tensor."""
    if isinstance(weights, StoredWeights):
        return weights.shape(name), weights.is_float(name)
    return weights[name].shape, weights[name].dtype.kind == "f"


def _take_scales(entries: dict[str, _Entry]) -> dict[str, _Entry]:
    """Takes the scales of int8 matrices out of ``entries``, by the matrices' names."""
    quantized = [n for n, e in entries.items() if e.dtype == "I8" and n + SCALE in entries]
    scales = {name: entries.pop(name + SCALE) for name in quantized}
    for name, scale in scales.items():
        found, shape = (scale.dtype, *scale.shape), entries[name].shape
        if len(shape) != 2 or found != ("F32", shape[0]):
            raise CheckpointError(
                f"{scale.path}: {name}{SCALE} is {scale.dtype} {list(scale.shape)},"
                f" wanted F32 {list(shape[:1])} for {name} {list(shape)}"
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
