"""A checkpoint's weights as numpy arrays, each read when it is asked for, from files of any kind.

`model.checkpoint_files` finds the files of a folder and reads them. What is stored in fewer bits
comes out as float32.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from model.architectures.config import Config
from model.files import FileError
from model.tensor_spec import Shape

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: A folder's weights are one file, or several that an index names: the first form that is there.
FORMS = (
    (WEIGHTS, INDEX),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ("consolidated.safetensors", "consolidated.safetensors.index.json"),
)
#: No layer of any family has fewer keys, ours or those of another project.
MIN_LAYER_KEYS = 3
#: Ends the name of the scales of an int8 matrix, [rows] float32, or of `model.weights.int4`.
SCALE = ".scale"

Array = npt.NDArray[Any]
Weights = Mapping[str, Array]

#: The names that users know those of floating point and int8 by.
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}


class CheckpointError(FileError):
    """A folder that is not a checkpoint of this project. The message names the file and the key."""


class StoredWeights(Mapping[str, Array], ABC):
    """Tensors in files, each read when it is asked for, as float32 where it is floating point.

    ``name`` is what messages call the files.
    """

    name = WEIGHTS

    @abstractmethod
    def __contains__(self, name: object) -> bool:
        """Unlike in `Mapping`, the tensor is not read."""

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

    def dtype_of(self, name: str) -> str:
        """The dtype that the files have a tensor in, where they may differ; of several, one."""
        return self.stored_dtype

    def block_kind(self, name: str) -> str | None:
        """What GGUF calls the blocks that `blocks` gives.

        None where a tensor is not in blocks, or comes out with other numbers than these have.
        """
        return None

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        """Rows of a matrix that has a `block_kind`, as the file has them: uint8 [rows, bytes]."""
        raise NotImplementedError(name)

    @property
    def is_quantized(self) -> bool:
        """Whether most of the numbers are in blocks or rows of integers with a scale."""
        return False


class WrappedWeights(StoredWeights):
    """Those of ``base``; a subclass changes names, shapes or numbers.

    A subclass says of which tensors it leaves the blocks as they are (`block_kind`).
    """

    def __init__(self, base: StoredWeights) -> None:
        self._base, self.name = base, base.name

    def __getitem__(self, name: str) -> Array:
        return self._base[name]

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        return self._base.rows(name, begin, end)

    def release(self) -> None:
        self._base.release()

    def __contains__(self, name: object) -> bool:
        return name in self._base

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)

    def shape(self, name: str) -> Shape:
        return self._base.shape(name)

    def is_float(self, name: str) -> bool:
        return self._base.is_float(name)

    @property
    def stored_dtype(self) -> str:
        return self._base.stored_dtype

    def dtype_of(self, name: str) -> str:
        return self._base.dtype_of(name)

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        return self._base.blocks(name, begin, end)

    @property
    def is_quantized(self) -> bool:
        return self._base.is_quantized


class _HasShape(Protocol):
    """Where a tensor is in its file."""

    @property
    def shape(self) -> Shape: ...


Entry = TypeVar("Entry", bound=_HasShape)


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


def check_num_layers(num_layers: int, num_keys: int, name: str) -> None:
    """Raises `CheckpointError` where the file ``name`` has too few keys for so many layers.

    The number is a config's word alone: it is checked before anything is made for each layer.
    """
    if num_layers * MIN_LAYER_KEYS > num_keys:
        raise CheckpointError(f"{name} has {num_keys} keys, too few for {num_layers} layers")


def check_weights(config: Config, weights: Weights) -> None:
    """Raises `CheckpointError` where a key is missing, unknown, or of another shape or kind."""
    file = file_name(weights)
    check_num_layers(config.num_hidden_layers, len(weights), file)
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
