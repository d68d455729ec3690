"""Weights in the files of other projects: by our names as they are read, or taken key by key.

`Renamed` has them by our names, and `KeyShapes` the shapes by their keys. `Weights` has arrays by
foreign key, of which each must be taken, and none may be missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from model.tensor_spec import Shape
from model.weights import Array, CheckpointError, StoredWeights, check_num_layers, shape_in

#: One number, or one for each row.
Factor = float | tuple[float, ...]


@dataclass(frozen=True)
class Part:
    """Where a tensor of ours is: the file's keys, of which several are stacked as rows.

    ``form``: "same", "transposed", "flat" without two leading axes of one, "squeezed" without the
    middle one (a depthwise convolution), "column" without a second of one, "plus_one" for norms
    that are stored less one, "log_negative" for ``log(-x)``, perhaps of a column, "flattened" with
    one axis, "first_half" or "second_half" of the rows.

    ``factor``: what the numbers are multiplied with.
    """

    keys: tuple[str, ...]
    form: str = "same"
    factor: Factor = 1.0


#: Forms of which some rows are those of the file's.
_BY_ROWS = ("same", "squeezed", "column", "plus_one", "log_negative")
#: Those that are one half of the rows, and which.
HALVES = {"first_half": 0, "second_half": 1}


class Renamed(StoredWeights):
    """The tensors of ``files`` by our names."""

    def __init__(self, files: Mapping[str, Array], parts: Mapping[str, Part]) -> None:
        self._files, self._parts = files, parts

    def __getitem__(self, name: str) -> Array:
        part = self._parts[name]
        tensors = [_formed(self._files[key], part.form) for key in part.keys]
        return _times(tensors[0] if len(tensors) == 1 else np.stack(tensors), part, 0)

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        part = self._parts[name]
        if not isinstance(self._files, StoredWeights) or len(part.keys) > 1:
            return self[name][begin:end]
        if part.form in HALVES:
            num_rows = self.shape(name)[0]
            first = HALVES[part.form] * num_rows
            begin, end, _ = slice(begin, end).indices(num_rows)
            rows = self._files.rows(part.keys[0], first + begin, first + end)
            return _times(rows, part, begin)
        if part.form in _BY_ROWS:
            rows = self._files.rows(part.keys[0], begin, end)
            return _times(_formed(rows, part.form), part, begin)
        return self[name][begin:end]

    def release(self) -> None:
        if isinstance(self._files, StoredWeights):
            self._files.release()

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def shape(self, name: str) -> Shape:
        part = self._parts[name]
        shape = formed_shape(shape_in(self._files, part.keys[0]), part.form)
        return shape if len(part.keys) == 1 else (len(part.keys), *shape)

    def is_float(self, name: str) -> bool:
        keys = self._parts[name].keys
        if isinstance(self._files, StoredWeights):
            return all(self._files.is_float(key) for key in keys)
        return all(self._files[key].dtype.kind == "f" for key in keys)

    @property
    def stored_dtype(self) -> str:
        assert isinstance(self._files, StoredWeights), type(self._files)
        return self._files.stored_dtype

    def dtype_of(self, name: str) -> str:
        assert isinstance(self._files, StoredWeights), type(self._files)
        return self._files.dtype_of(self._parts[name].keys[0])

    def block_kind(self, name: str) -> str | None:
        part = self._parts[name]
        if not isinstance(self._files, StoredWeights) or len(part.keys) > 1:
            return None
        if part.form != "same" or part.factor != 1.0:
            return None
        return self._files.block_kind(part.keys[0])

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        assert isinstance(self._files, StoredWeights), type(self._files)
        return self._files.blocks(self._parts[name].keys[0], begin, end)

    @property
    def is_quantized(self) -> bool:
        return isinstance(self._files, StoredWeights) and self._files.is_quantized

    def check(self, name: str, wanted: Mapping[str, Shape], unused: Set[str]) -> None:
        """Raises `CheckpointError` for a key that is missing, unknown or of another shape or kind.

        ``wanted`` are the shapes that the config lists, ``unused`` keys that may be left in the
        files, which are called ``name``.
        """
        files, parts = self._files, self._parts
        known = {key for part in parts.values() for key in part.keys}
        missing = [key for part in parts.values() for key in part.keys if key not in files]
        if missing:
            raise CheckpointError(f"{name} lacks key {missing[0]!r} ({len(missing)} in all)")
        left = sorted(set(files) - known - unused)
        if left:
            raise CheckpointError(f"{name} has an unknown key {left[0]!r} ({len(left)} in all)")
        for ours, part in parts.items():
            shape = wanted[ours] if len(part.keys) == 1 else wanted[ours][1:]
            for key in part.keys:
                found = shape_in(files, key)
                if formed_shape(found, part.form) != shape:
                    want = shape[::-1] if part.form == "transposed" else shape
                    raise CheckpointError(f"{name}: {key} is {list(found)}, wanted {list(want)}")
        for ours, part in parts.items():
            if not self.is_float(ours):
                raise CheckpointError(f"{name}: {part.keys[0]} is of integers")


#: Read at a time where large tensors are compared.
_ROWS = 4096


def are_equal(files: Mapping[str, Array], one: str, other: str) -> bool:
    """Whether two tensors of ``files`` have the same numbers; a part of each is read at a time."""
    shape = shape_in(files, one)
    if shape != shape_in(files, other):
        return False

    def rows(key: str, begin: int) -> Array:
        if isinstance(files, StoredWeights):
            return files.rows(key, begin, begin + _ROWS)
        return files[key][begin : begin + _ROWS]

    starts = range(0, shape[0] if shape else 0, _ROWS)
    return all(np.array_equal(rows(one, begin), rows(other, begin)) for begin in starts)


def formed_shape(shape: Shape, form: str) -> Shape:
    """Our shape of a file's tensor that has ``form``."""
    if form == "transposed":
        return shape[::-1]
    if form == "flat" and len(shape) == 3 and shape[:2] == (1, 1):
        return shape[2:]
    if form == "squeezed" and len(shape) == 3 and shape[1] == 1:
        return (shape[0], shape[2])
    if form == "flattened":
        return (math.prod(shape),)
    if form in HALVES and shape and shape[0] % 2 == 0:
        return (shape[0] // 2, *shape[1:])
    if form in ("column", "log_negative") and len(shape) == 2 and shape[1] == 1:
        return shape[:1]
    return shape


def _formed(tensor: Array, form: str) -> Array:
    if form == "transposed":
        return tensor.T
    if form == "plus_one":
        return np.asarray(tensor, np.float32) + np.float32(1)
    if form in HALVES:
        half = len(tensor) // 2
        return tensor[HALVES[form] * half :][:half]
    if form == "log_negative":
        tensor = np.log(-np.asarray(tensor, np.float32))
    return tensor.reshape(formed_shape(tensor.shape, form))


def _times(rows: Array, part: Part, begin: int) -> Array:
    """Some rows of a part, from ``begin`` on, times its factor."""
    if part.factor == 1.0:
        return rows
    factor = np.asarray(part.factor, np.float32)
    if factor.ndim:
        factor = factor[begin : begin + len(rows)].reshape(-1, *(1,) * (rows.ndim - 1))
    product: Array = np.asarray(rows, np.float32) * factor
    return product


# -------------------------------------------------------------------------------------------------
# The shapes of a file's tensors by its keys, from which readers take the sizes of a model.


class KeyShapes:
    """The shapes in ``files``, which errors call ``name``."""

    def __init__(self, files: Mapping[str, Array], name: str) -> None:
        self._files, self.name = files, name

    def __call__(self, key: str, num_axes: int = 2) -> Shape:
        """Of a tensor that must be there with so many axes; raises `CheckpointError`."""
        if key not in self._files:
            raise CheckpointError(f"{self.name} lacks key {key!r}")
        found = shape_in(self._files, key)
        if len(found) != num_axes or 0 in found:
            raise CheckpointError(f"{self.name}: {key} is {list(found)}, wanted {num_axes} axes")
        return found

    def formed(self, key: str, form: str) -> Shape:
        """Our shape of a matrix of the `Part.form` ``form``."""
        return formed_shape(self(key), form)

    def num_layers(self, block: str) -> int:
        """How many numbers the keys have in the place of ``{}`` in ``block``.

        Raises `CheckpointError` where there are too few keys for so many layers.
        """
        pattern = re.escape(block).replace(r"\{\}", r"(\d{1,9})") + r"\."
        layers = {int(match[1]) for key in self._files if (match := re.match(pattern, key))}
        check_num_layers(len(layers), len(self._files), self.name)
        return len(layers)


class Weights:
    """The tensors that are left. A reader takes what it knows; `refuse_unknown` names the rest."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors
        self._left = {name: name for name in tensors}  # as the reader knows it -> as the file does

    def take(self, *names: str) -> Array:
        """The one tensor that has one of these names, which are historical variants of one key."""
        found = [name for name in names if name in self._left]
        if not found:
            raise CheckpointError(f"the weights lack key {' or '.join(map(repr, names))}")
        return self._tensors[self._left.pop(found[0])]

    def take_grouped(self, key: str, num_heads: int, groups: int) -> Array:
        """Rows [heads * dim, ...] with each head ``groups`` times: grouped keys or values.

        ``num_heads`` counts those before the expansion.
        """
        return self._repeated(key, self.take(key), num_heads, groups)

    def join(self, *keys: str) -> Array:
        """The rows of all ``keys`` in one tensor."""
        parts = {key: self.take(key) for key in keys}
        _refuse_misfits(parts)
        return np.concatenate(list(parts.values()))

    def join_qkv(self, pattern: str, num_heads: int, groups: int, grouped: str = "kv") -> Array:
        """The rows of q, k and v in one tensor, the ``grouped`` ones as `take_grouped` gives them.

        ``pattern`` is their key with ``{}`` in the place of the letter.
        """
        parts = {key: self.take(key) for key in (pattern.format(name) for name in "qkv")}
        _refuse_misfits(parts)
        return np.concatenate(
            [
                self._repeated(key, part, num_heads, groups) if name in grouped else part
                for name, (key, part) in zip("qkv", parts.items(), strict=True)
            ]
        )

    def has(self, name: str) -> bool:
        """Whether ``name`` is left."""
        return name in self._left

    def num_rows(self, name: str) -> int:
        """How many rows a tensor has that stays."""
        if name not in self._left:
            raise CheckpointError(f"the weights lack key {name!r}")
        shape = self._tensors[self._left[name]].shape
        if not shape:
            raise CheckpointError(f"{name} is {list(shape)}: it has no rows")
        return int(shape[0])

    def drop(self, pattern: str) -> None:
        """Leaves out the buffers whose whole key matches: tables that a config implies."""
        for name in [name for name in self._left if re.fullmatch(pattern, name)]:
            del self._left[name]

    def without_prefix(self, prefix: str) -> None:
        """Takes ``prefix`` off the keys that have it."""
        self._left = {name.removeprefix(prefix): key for name, key in self._left.items()}

    def head(self, tied: bool, embedding: Array) -> dict[str, Array]:
        """``head.weight`` where it is not ``tied``; a tied one may be there if it is the same."""
        if not tied:
            return {"head.weight": self.take("lm_head.weight")}
        if self.has("lm_head.weight") and not np.array_equal(
            self.take("lm_head.weight"), embedding
        ):
            raise CheckpointError(
                "lm_head.weight is not the embedding, though tie_word_embeddings is true"
            )
        return {}

    def take_all(self) -> Mapping[str, Array]:
        """All tensors, for a reader that checks the keys itself."""
        self._left = {}
        return self._tensors

    def refuse_unknown(self) -> None:
        """Raises `CheckpointError` for a key that no reader took."""
        if self._left:
            raise CheckpointError(
                f"the weights have an unknown key {min(self._left)!r} ({len(self._left)} in all)"
            )

    def _repeated(self, key: str, tensor: Array, num_heads: int, groups: int) -> Array:
        if not tensor.ndim or not len(tensor) or len(tensor) % num_heads:
            raise CheckpointError(
                f"{key} is {list(tensor.shape)}: its rows do not divide into {num_heads} heads"
            )
        # Repeated for each query it is as large as what makes the queries, which is in the file.
        if tensor.size * groups > self._num_numbers:
            raise CheckpointError(f"{key} is {list(tensor.shape)}: not for {groups} queries each")
        heads = tensor.reshape(num_heads, -1, *tensor.shape[1:])
        return np.repeat(heads, groups, axis=0).reshape(-1, *tensor.shape[1:])

    @cached_property
    def _num_numbers(self) -> int:
        return sum(math.prod(shape_in(self._tensors, key)) for key in self._tensors)


def _refuse_misfits(parts: dict[str, Array]) -> None:
    """Raises `CheckpointError` where the rows of the parts, by key, are not of one shape."""
    name, first = next(iter(parts.items()))
    for key, tensor in parts.items():
        if not tensor.ndim or tensor.shape[1:] != first.shape[1:]:
            raise CheckpointError(
                f"{key} is {list(tensor.shape)}: its rows do not fit under those of"
                f" {name}, {list(first.shape)}"
            )
