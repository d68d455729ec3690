"""The metadata and tensors of a GGUF file, its types, and the parts of a split one."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Collection, Mapping
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

# -------------------------------------------------------------------------------------------------
# The types of a GGUF file's tensors, and their numbers as float32.
#
# The package ``gguf`` unpacks quantised blocks. It imports slowly, so it is imported when the first
# block is read, and the sizes of blocks are defined here; a test compares them with the package's.


@dataclass(frozen=True)
class GgufKind:
    """How numbers are stored: blocks of ``block`` numbers in ``num_bytes`` bytes."""

    name: str
    block: int
    num_bytes: int


#: Codes of tensor types. Those of one number in a block are floating point; the rest is quantised.
#: NVFP4 has scales in other tensors, and nothing unpacks Q1_0, Q8_1 and Q8_K.
KINDS = {
    0: GgufKind("F32", 1, 4),
    1: GgufKind("F16", 1, 2),
    2: GgufKind("Q4_0", 32, 18),
    3: GgufKind("Q4_1", 32, 20),
    6: GgufKind("Q5_0", 32, 22),
    7: GgufKind("Q5_1", 32, 24),
    8: GgufKind("Q8_0", 32, 34),
    10: GgufKind("Q2_K", 256, 84),
    11: GgufKind("Q3_K", 256, 110),
    12: GgufKind("Q4_K", 256, 144),
    13: GgufKind("Q5_K", 256, 176),
    14: GgufKind("Q6_K", 256, 210),
    16: GgufKind("IQ2_XXS", 256, 66),
    17: GgufKind("IQ2_XS", 256, 74),
    18: GgufKind("IQ3_XXS", 256, 98),
    19: GgufKind("IQ1_S", 256, 50),
    20: GgufKind("IQ4_NL", 32, 18),
    21: GgufKind("IQ3_S", 256, 110),
    22: GgufKind("IQ2_S", 256, 82),
    23: GgufKind("IQ4_XS", 256, 136),
    29: GgufKind("IQ1_M", 256, 56),
    30: GgufKind("BF16", 1, 2),
    34: GgufKind("TQ1_0", 256, 54),
    35: GgufKind("TQ2_0", 256, 66),
    39: GgufKind("MXFP4", 32, 17),
}
QUANTIZED = frozenset(kind.name for kind in KINDS.values() if kind.block > 1)
#: Where a block has its float16.
SCALES = {
    "Q4_1": slice(0, 4),
    "Q8_0": slice(0, 2),
    "Q4_K": slice(0, 4),
    "Q5_K": slice(0, 4),
    "Q6_K": slice(208, 210),
    "IQ4_XS": slice(0, 2),
    "IQ4_NL": slice(0, 2),
}
#: What numpy reads the others as.
NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
#: Numbers that are unpacked at a time: a block's intermediate results stay in the cache.
_CHUNK = 1 << 18


def unpacked(rows: Array, kind: GgufKind, columns: int) -> Array:
    """Rows of blocks as float32 [rows, columns], a part at a time."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values = np.empty((len(rows), columns), np.float32)
    step = max(1, _CHUNK // columns)
    with np.errstate(all="ignore"):  # a scale may be any bits; what is not finite is found later
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            values[at : at + step] = dequantize(part, GGMLQuantizationType[kind.name])
    return values


def block_scales(blocks: Array, kind: str) -> Array:
    """What the numbers of blocks of `SCALES` are multiples of, as float32: [rows, scales]."""
    num_bytes = next(each.num_bytes for each in KINDS.values() if each.name == kind)
    each = blocks.reshape(len(blocks), -1, num_bytes)[..., SCALES[kind]].copy()
    return each.view(np.float16).reshape(len(blocks), -1).astype(np.float32)


def kind_name(code: int) -> str:
    """What the format calls a type that is not supported."""
    from gguf.constants import GGMLQuantizationType

    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    return known.get(code, str(code))


# -------------------------------------------------------------------------------------------------
# The parts of a split GGUF file: their names, and what their headers say of each other.
#
# They are called ``NAME-00001-of-00003.gguf`` and so on. In each ``split.no`` counts from 0,
# ``split.count`` is the number of parts, and ``split.tensors.count`` that of the tensors in all of
# them. The first has the other metadata.


NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
#: More parts than this are not looked for.
MAX_PARTS = 1024


def part_names(path: str) -> list[str]:
    """The paths of all parts in order, given that of any; else ``path`` alone."""
    found = _PART.fullmatch(path)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]) <= MAX_PARTS:
        return [path]
    stem, count = found["stem"], int(found["count"])
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def part_paths(path: Path) -> list[Path]:
    """The same of a file's path."""
    return [path.with_name(name) for name in part_names(path.name)]


def is_first_part(path: str) -> bool:
    """Whether it is a file of one part, or the first of several."""
    return part_names(path)[0] == path


def check_parts(parts: Mapping[str, tuple[Mapping[str, Any], Collection[str]]]) -> None:
    """Raises `CheckpointError` where files are not all parts of one.

    ``parts`` has the metadata and the names of the tensors of each by its name, in order.
    """
    where: dict[str, str] = {}
    first, num_tensors = next((name, found[0].get(TENSORS)) for name, found in parts.items())
    for number, (name, (metadata, tensors)) in enumerate(parts.items()):
        if metadata.get(COUNT, 1) != len(parts):
            raise CheckpointError(
                f"{name}: {COUNT} is {metadata.get(COUNT)!r:.80}, its name says {len(parts)} parts"
                " (they are called NAME-00001-of-00003.gguf and so on)"
            )
        for key, wanted in ((NUMBER, number), (TENSORS, num_tensors)):
            if metadata.get(key) != wanted:
                found = f"{metadata.get(key)!r:.80}"
                raise CheckpointError(f"{name}: {key} is {found}, not {wanted} as after {first}")
        for tensor in tensors:
            if tensor in where:
                raise CheckpointError(f"{name}: the tensor {tensor} is in {where[tensor]} too")
            where[tensor] = name
    if len(where) != num_tensors:
        raise CheckpointError(
            f"{first}: {TENSORS} is {num_tensors!r:.80}, the parts have {len(where)} tensors"
        )


# -------------------------------------------------------------------------------------------------
# The metadata and tensors of a GGUF file, memory-mapped; each tensor is read when asked for.
#
# Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
# little-endian. A header is metadata (key, type, value), then for each tensor its name, sizes, type
# and offset.
#
# The reader of the package ``gguf`` makes several arrays for every string of a vocabulary (1.7 s
# and 120 MB for 65,536 tokens) and trusts every count in the header. Here each count is checked
# against the bytes that are left, so that a damaged file cannot make it allocate more memory than
# the file has. Quantised blocks are unpacked by that package (`model.weights.gguf_file`).


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
