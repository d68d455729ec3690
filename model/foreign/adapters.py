"""Weights with changes that are added when their rows are read, and what ``peft`` says of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from model.files import read_json
from model.weights import Array, CheckpointError, StoredWeights, WrappedWeights

# The changes are computed in float64, and the sum is rounded to float32 once.


Wide = npt.NDArray[np.float64]
#: Numbers of a weight that are changed at a time.
_CHUNK = 1 << 22


class Change(Protocol):
    """Rows are changed in groups of ``step``."""

    @property
    def step(self) -> int: ...

    def apply(self, values: Wide, first: int) -> Wide:
        """The rows from ``first`` on, changed; ``values`` may be changed in place."""


@dataclass(frozen=True)
class LowRankChange:
    """W + scale B A, with A [r, in] and B [out, r]."""

    a: Array
    b: Array
    scale: float
    step = 1

    def apply(self, values: Wide, first: int) -> Wide:
        rows = self.b[first : first + len(values)].astype(np.float64)
        values += self.scale * (rows @ self.a.astype(np.float64))
        return values


@dataclass(frozen=True)
class DirectedChange:
    """Rows of `LowRankChange`'s sum, each divided by its length and times a number of ``m``.

    A row of zeros has no direction, and stays.
    """

    change: LowRankChange
    m: Array
    step = 1

    def apply(self, values: Wide, first: int) -> Wide:
        values = self.change.apply(values, first)
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        m: Wide = self.m[first : first + len(values), None].astype(np.float64)
        values *= np.divide(m, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        return values


@dataclass(frozen=True)
class Tiled:
    """W[o, i] + D[i mod r, o mod n], with D [r, n]; n divides ``out``."""

    d: Array
    out: int
    step = 1

    def apply(self, values: Wide, first: int) -> Wide:
        rank, period = self.d.shape
        rows = (first + np.arange(len(values))) % period
        values += self.d.T[rows][:, np.arange(values.shape[1]) % rank]
        return values


@dataclass(frozen=True)
class Blocks:
    """W_ab + W_ab D_c + D_c, with D [n, r, r]; c is the row a or the column b of a block."""

    d: Array
    by_row: bool

    @property
    def step(self) -> int:
        return int(self.d.shape[-1])

    def apply(self, values: Wide, first: int) -> Wide:
        rank = self.step
        blocks = values.reshape(-1, rank, values.shape[1] // rank, rank).transpose(0, 2, 1, 3)
        d: Wide = self.d.astype(np.float64)
        d = d[first // rank :][: len(blocks), None] if self.by_row else d[None]
        blocks = blocks + blocks @ d + d
        changed: Wide = blocks.transpose(0, 2, 1, 3).reshape(values.shape)
        return changed


@dataclass(frozen=True)
class Whole:
    """Another tensor in the place of W."""

    weights: StoredWeights
    name: str
    step = 1

    def apply(self, values: Wide, first: int) -> Wide:
        values[:] = self.weights.rows(self.name, first, first + len(values))
        return values


@dataclass(frozen=True)
class RowChange:
    """Another row in the place of one."""

    values: Array
    row: int
    step = 1

    def apply(self, values: Wide, first: int) -> Wide:
        if first <= self.row < first + len(values):
            values[self.row - first] = self.values
        return values


class Merged(WrappedWeights):
    """``base`` with ``changes`` by name, in their order."""

    def __init__(self, base: StoredWeights, changes: Mapping[str, Sequence[Change]]) -> None:
        super().__init__(base)
        self._changes = changes

    def __getitem__(self, name: str) -> Array:
        if name not in self._changes:
            return super().__getitem__(name)
        shape = self.shape(name)
        values = np.empty(shape, np.float32)
        step = max(1, _CHUNK // max(1, math.prod(shape[1:])))
        for begin in range(0, shape[0], step):
            values[begin : begin + step] = self.rows(name, begin, begin + step)
        return values

    def block_kind(self, name: str) -> str | None:
        return None if name in self._changes else self._base.block_kind(name)

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        changes = self._changes.get(name)
        if not changes:
            return super().rows(name, begin, end)
        count = self.shape(name)[0]
        end = count if end is None else min(end, count)
        step = math.lcm(*(change.step for change in changes))
        first = begin - begin % step
        values: Wide = self._base.rows(name, first, -(-end // step) * step).astype(np.float64)
        for change in changes:
            values = change.apply(values, first)
        return values[begin - first : max(end, begin) - first].astype(np.float32)


# -------------------------------------------------------------------------------------------------
# ``adapter_config.json`` of the package ``peft``: what it says of how a file is merged.


#: Values that change what is merged, and those of them that are supported.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    # Layers that are repeated, and parameters that are no Linear weights.
    "layer_replication": (None,),
    "target_parameters": (None, []),
    # Other sums than W + scale B A.
    "use_qalora": (False, None),
    "use_bdlora": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "arrow_config": (None,),
    # Whether an embedding and a head that are one weight were trained as one.
    "ensure_weight_tying": (False, None),
    # Changes that hold behind certain tokens only.
    "alora_invocation_tokens": (None,),
    # The others change the weights of the model before the training.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "init_weights": (True, False, None, "bat", "mini"),
}


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA's ``alpha``, divided by the rank, or ``by_root`` by its root; MiSS's ``mini_rank``.

    ``has_lengths``: whether every change is of DoRA.
    """

    alpha: float | None = None
    by_root: bool = False
    has_lengths: bool = False
    mini_rank: int | None = None


def read_adapter_config(path: Path) -> AdapterConfig:
    """What the file says.

    Raises `CheckpointError` that names the file and the field, and `ConfigError`.
    """
    values = read_json(path)
    kind = values.get("peft_type")
    if kind not in ("LORA", "MISS", "BONE"):
        raise CheckpointError(f"{path}: peft_type {kind!r:.80} is not supported, only LORA or MISS")
    for field, supported in _SUPPORTED.items():
        value = values.get(field, supported[0])
        if not any(type(value) is type(each) and value == each for each in supported):
            raise CheckpointError(f"{path}: {field} {value!r:.80} is not supported")
    alpha = _positive(path, values, "lora_alpha") if kind == "LORA" else None
    mini_rank = values.get("mini_r") if values.get("init_weights") == "mini" else None
    if values.get("init_weights") == "mini" and (type(mini_rank) is not int or mini_rank < 1):
        raise CheckpointError(f"{path}: mini_r must be a positive integer, not {mini_rank!r:.80}")
    by_root, has_lengths = (_flag(path, values, field) for field in ("use_rslora", "use_dora"))
    return AdapterConfig(alpha, by_root, has_lengths, mini_rank)


def _flag(path: Path, values: dict[str, Any], field: str) -> bool:
    value = values.get(field) or False
    if type(value) is not bool:
        raise CheckpointError(f"{path}: {field} must be a boolean, not {value!r:.80}")
    return value


def _positive(path: Path, values: dict[str, Any], field: str) -> float:
    value = values.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise CheckpointError(f"{path}: {field} must be a positive number, not {value!r:.80}")
    return float(value)
