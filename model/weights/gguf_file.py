"""The metadata and tensors of a GGUF file, memory-mapped; each tensor is read when asked for.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
A header is metadata (key, type, value), then for each tensor its name, sizes, type and offset.

The reader of the package ``gguf`` makes several arrays for every string of a vocabulary (1.7 s
and 120 MB for 65,536 tokens) and trusts every count in the header. Here each count is checked
against the bytes that are left, so that a damaged file cannot make it allocate more memory than the
file has. Quantised blocks are unpacked by that package (`model.weights.gguf_kinds`).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from model.weights.gguf_kinds import KINDS, NUMPY, QUANTIZED, GgufKind, kind_name, unpacked
from model.weights.gguf_parts import COUNT, check_parts, part_paths

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: Bounds of a header; published files are far below.
MAX_NAME_BYTES, MAX_STRING_BYTES = 256, 1 << 22
#: Of a string in an array, such as a token, and of all of them.
MAX_ITEM_BYTES, MAX_ITEMS_BYTES = 1 << 14, 1 << 26
MAX_FIELDS, MAX_STRINGS, MAX_TENSORS, MAX_AXES = 1 << 12, 1 << 20, 1 << 16, 4
MAX_ALIGNMENT = 1 << 16

#: Codes of metadata types -> `struct` format of one number.
_SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is: ``start`` and ``num_bytes`` count bytes of the file ``data``."""

    kind: GgufKind
    shape: Shape
    start: int
    num_bytes: int
    data: mmap.mmap


@dataclass(frozen=True)
class _GgufPart:
    """What is in one file."""

    data: mmap.mmap
    metadata: dict[str, Any]
    arrays: dict[str, Any]
    tensors: dict[str, GgufTensor]


class GgufFile(MappedWeights[GgufTensor]):
    """The tensors by name, [rows, columns] as numpy has it, and what the header says by key.

    ``metadata`` has strings and single numbers. ``arrays`` has lists of strings, as bytes, and
    arrays of numbers, which share the file's memory. ``paths`` has all parts of a split file.
    """

    def __init__(self, path: Path) -> None:
        """Raises `CheckpointError` in one line for what is damaged or not supported.

        ``path`` may be that of any part of a split file; the others lie in the same folder.
        """
        part = _read(path)
        self.paths = [path] if part.metadata.get(COUNT, 1) == 1 else part_paths(path)
        others = {other: _read(other) for other in self.paths if other != path}
        parts = {other.name: others.get(other, part) for other in self.paths}
        if part.metadata.get(COUNT, 1) != 1:
            check_parts({name: (each.metadata, each.tensors) for name, each in parts.items()})
        first = parts[self.paths[0].name]
        self.metadata, self.arrays = first.metadata, first.arrays
        self._tensors = {name: t for each in parts.values() for name, t in each.tensors.items()}
        self._maps = [each.data for each in parts.values()]

    def release(self) -> None:
        for data in self._maps:
            release_pages(data)

    def _rows(self, name: str, rows: slice) -> Array:
        tensor = self._tensors[name]
        kind, columns = tensor.kind, tensor.shape[-1]
        if kind.block == 1:
            count = math.prod(tensor.shape)
            raw = np.frombuffer(tensor.data, NUMPY[kind.name], count, tensor.start)
            return decoded(raw.reshape(tensor.shape)[rows], kind.name)
        blocks = _blocks_of(tensor)
        found = blocks[rows] if len(tensor.shape) > 1 else blocks
        values = unpacked(found.reshape(-1, blocks.shape[-1]), kind, columns)
        values = values.reshape(*found.shape[:-1], columns)
        return values if len(tensor.shape) > 1 else values[rows]

    @property
    def stored_dtype(self) -> str:
        return most_common_dtype((t.kind.name, t.shape) for t in self._tensors.values())

    def dtype_of(self, name: str) -> str:
        return self._tensors[name].kind.name

    def block_kind(self, name: str) -> str | None:
        tensor = self._tensors[name]
        return tensor.kind.name if tensor.kind.block > 1 and len(tensor.shape) == 2 else None

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        rows: Array = _blocks_of(self._tensors[name])[begin:end]
        return rows

    @property
    def is_quantized(self) -> bool:
        return self.stored_dtype in QUANTIZED


def _blocks_of(tensor: GgufTensor) -> Array:
    """Its bytes, [..., bytes of a row]."""
    row_bytes = tensor.shape[-1] // tensor.kind.block * tensor.kind.num_bytes
    bytes_ = np.frombuffer(tensor.data, np.uint8, tensor.num_bytes, tensor.start)
    return bytes_.reshape(*tensor.shape[:-1], row_bytes)


def _read(path: Path) -> _GgufPart:
    """One file. Raises `CheckpointError`."""
    try:
        with open_file(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path.name} is not a GGUF file: it is empty") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    try:
        header = _Header(data)
        fields = header.fields()
        is_array = {key: isinstance(value, list | np.ndarray) for key, value in fields.items()}
        metadata = {key: value for key, value in fields.items() if not is_array[key]}
        arrays = {key: value for key, value in fields.items() if is_array[key]}
        tensors = header.tensors(metadata.get("general.alignment", 32))
    except _Damaged as error:
        raise CheckpointError(f"{path.name}: {error}") from error
    return _GgufPart(data, metadata, arrays, tensors)


class _Damaged(Exception):
    """What is wrong with a header."""


class _Header:
    """Reads a header from its beginning. Raises `_Damaged` where it reaches beyond the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._num_strings, self._items_bytes = data, 0, 0, 0
        if self._take(4, "the file") != MAGIC:
            raise _Damaged("it is not a GGUF file")
        version = self._number("I", "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            order = ", in big-endian order," if swapped in VERSIONS else ""
            raise _Damaged(f"version {swapped if order else version}{order} is not supported")
        self._num_tensors = self._count(MAX_TENSORS, 24, "tensors")
        self._num_fields = self._count(MAX_FIELDS, 13, "metadata keys")

    def fields(self) -> dict[str, Any]:
        """The metadata."""
        fields: dict[str, Any] = {}
        for _ in range(self._num_fields):
            key = self._name("a metadata key")
            if key in fields:
                raise _Damaged(f"the metadata key {key!r} is there twice")
            fields[key] = self._value(self._number("I", key), key)
        return fields

    def tensors(self, alignment: object) -> dict[str, GgufTensor]:
        """Where the tensors are; none overlaps another one."""
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise _Damaged(f"general.alignment must be in 1..{MAX_ALIGNMENT}, not {alignment!r}")
        found: dict[str, GgufTensor] = {}
        for _ in range(self._num_tensors):
            name = self._name("a tensor's name")
            if name in found:
                raise _Damaged(f"the tensor {name!r} is there twice")
            found[name] = self._tensor(name, alignment)
        start = -(-self._at // alignment) * alignment
        placed = {name: replace(t, start=start + t.start) for name, t in found.items()}
        _check_places(placed, len(self._data))
        return placed

    def _tensor(self, name: str, alignment: int) -> GgufTensor:
        num_axes = self._number("I", name)
        if not 1 <= num_axes <= MAX_AXES:
            raise _Damaged(f"{name} has {num_axes} axes, not 1..{MAX_AXES}")
        sizes = [self._number("Q", name) for _ in range(num_axes)]
        code, offset = self._number("I", name), self._number("Q", name)
        kind = KINDS.get(code)
        if kind is None:
            known = ", ".join(kind.name for kind in KINDS.values())
            raise _Damaged(f"{name} is of type {kind_name(code)}; supported are {known}")
        if 0 in sizes or sizes[0] % kind.block:
            raise _Damaged(f"{name} has rows of {sizes[0]} numbers, no blocks of {kind.block}")
        if offset % alignment:
            raise _Damaged(f"{name} begins at {offset}, which {alignment} does not divide")
        num_bytes = math.prod(sizes) // kind.block * kind.num_bytes
        return GgufTensor(kind, tuple(reversed(sizes)), offset, num_bytes, self._data)

    def _value(self, code: int, key: str) -> Any:
        if code == _STRING:
            return self._text(MAX_STRING_BYTES, key)
        if code == _FLOAT32:  # as its writer had it: 1e-05, not 9.999999747378752e-06
            return float(str(np.float32(self._number("f", key))))
        if code in _SCALARS:
            return self._number(_SCALARS[code], key)
        if code != _ARRAY:
            raise _Damaged(f"{key} is of the unknown type {code}")
        item = self._number("I", key)
        if item == _STRING:
            count = self._count(MAX_STRINGS - self._num_strings, 8, f"strings of {key}")
            self._num_strings += count
            return [self._item(key) for _ in range(count)]
        if item not in _SCALARS:
            raise _Damaged(f"{key} is an array of the unsupported type {item}")
        dtype = np.dtype("<" + _SCALARS[item])
        count = self._count(len(self._data), dtype.itemsize, f"numbers of {key}")
        numbers = np.frombuffer(self._data, dtype, count, self._at)
        self._at += numbers.nbytes
        return numbers

    def _item(self, key: str) -> bytes:
        item = self._string(MAX_ITEM_BYTES, f"a string of {key}")
        self._items_bytes += len(item)
        if self._items_bytes > MAX_ITEMS_BYTES:
            raise _Damaged(f"its arrays of strings have more than {MAX_ITEMS_BYTES:,} bytes")
        return item

    def _count(self, most: int, item_bytes: int, what: str) -> int:
        count: int = self._number("Q", what)
        if count > most or count * item_bytes > len(self._data) - self._at:
            raise _Damaged(f"its header counts {count} {what}: it is damaged or cut off")
        return count

    def _number(self, code: str, what: str) -> Any:
        (number,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code), what))
        return number

    def _name(self, what: str) -> str:
        name = self._text(MAX_NAME_BYTES, what)
        if not name.isprintable():  # it would be more than a line in a message
            raise _Damaged(f"{what} is not a name: {name!r}")
        return name

    def _text(self, most: int, what: str) -> str:
        data = self._string(most, what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise _Damaged(f"{what} is not UTF-8") from error

    def _string(self, most: int, what: str) -> bytes:
        count = self._number("Q", what)
        if count > most:
            raise _Damaged(f"{what} is a string of {count} bytes, more than {most}")
        return self._take(count, what)

    def _take(self, count: int, what: str) -> bytes:
        data = self._data[self._at : self._at + count]
        if len(data) < count:
            raise _Damaged(f"it is cut off at {what}")
        self._at += count
        return data


def _check_places(tensors: Mapping[str, GgufTensor], file_bytes: int) -> None:
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise _Damaged(f"{name} overlaps {before}")
        end, before = tensor.start + tensor.num_bytes, name
        if end > file_bytes:
            raise _Damaged(f"it is cut off at {name}: {file_bytes} bytes, {end} expected")
