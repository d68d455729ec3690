"""LoRA and MiSS files, merged into the weights of any family while these are read.

For a Linear weight W [out, in] and a rank r:

- LoRA (Hu et al. 2021, section 4.1): A [r, in] and B [out, r] give W + (alpha / r) B A, and
  rsLoRA (Kalajdzievski 2023, arXiv 2312.03732) W + (alpha / sqrt(r)) B A.
- DoRA (Liu et al. 2024, arXiv 2402.09353, eq. 5): each row of LoRA's sum gets the length m [out].
- MiSS (Kang 2024, arXiv 2409.15371), called Bone and DiSHA before: D [r, out] gives
  W[o, i] + D[i mod r, o].
- Its form "bat": D [n, r, r] turns each block W_ab [r, r] into W_ab + W_ab D_c + D_c. In files of
  RWKV-PEFT c is the block's column b, in those of the package ``peft`` it is the row a.

A file may have whole tensors too, which replace the model's: RWKV-PEFT trains norms in this way,
and ``peft`` what ``modules_to_save`` names. RWKV-PEFT's files are ``.pth`` by native names. The
package ``peft`` writes a folder with ``adapter_config.json``, and so do Unsloth and Axolotl, which
train with it; its keys are those of the family's own folders behind ``base_model.model``.

Where a model's head is its embedding and a file changes one of the two, the other stays as it was,
as in the training: the merged model has a head of its own.

The changes (`Change`) are added when rows of a weight are read (`Merged`), computed in float64 and
rounded to float32 once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from model.architectures.config import Config
from model.checkpoint_files import ADAPTER_CONFIG, Lora
from model.files import read_json
from model.foreign.tuned_states import tensors_of
from model.foreign.weights import HALVES, Part, Renamed
from model.tensor_spec import Shape
from model.weights import Array, CheckpointError, StoredWeights, Weights, WrappedWeights

#: ``attention`` of a config -> (module, function) that has the keys of each layout of the family's
#: files, as a `Part` by our names.
LAYOUTS: dict[str, tuple[str, str]] = {
    "rwkv7": ("model.families.rwkv7.read", "key_layouts"),
    "arwkv7": ("model.families.rwkv7.read_arwkv", "key_layouts"),
    "qwen35": ("model.families.qwen35.read", "key_layouts"),
    "lfm2": ("model.families.lfm2.read", "key_layouts"),
    "lfm3": ("model.families.lfm3.read", "key_layouts"),
    "llama": ("model.families.llama.read", "key_layouts"),
    "mamba": ("model.families.mamba.read", "key_layouts"),
    "mamba2": ("model.families.mamba.read", "key_layouts"),
    "mamba2_hybrid": ("model.families.mamba2_hybrid.read", "key_layouts"),
    "jamba": ("model.families.jamba.read", "key_layouts"),
}
#: What a folder of the package ``peft`` calls its tensors.
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
#: RWKV-PEFT writes it next to the files of PiSSA, whose tensors have the names of LoRA's.
PISSA = "init_pissa.pth"
EMBEDDING, HEAD = "embedding.weight", "head.weight"

_PEFT = "base_model.model."
_CHANGE = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_magnitude_vector|disha|bone|miss_block"
    r"|bone_block)(\.weight)?"
)
#: Part of LoRA, and found by the key of its A.
_WITH_A = ("lora_B", "lora_magnitude_vector")
#: Kinds of files that are known and cannot be merged.
_REFUSED = (
    (r"init_lora_[AB]$", "the initial matrices of PiSSA; merge them with RWKV-PEFT"),
    (r"lora_embedding_[AB]", "LoRA of an embedding, which is not supported"),
    (r"\.lora_E$", "AdaLoRA, which is not supported"),
    (r"\.lora_[AB]\.bias$", "a bias of LoRA, which is not supported"),
    (r"\.trainable_tokens_", "single rows of an embedding, which are not supported"),
    (r"\.(lokr|hada|oft|vera|boft)_", "a method that is not supported, only LoRA and MiSS"),
    (r"\.att\.time_state$", "a tuned state: --state NAME=FILE takes it"),
)


@dataclass(frozen=True)
class _Target:
    """Where a key's tensor is: the name of ours, and which of its rows where it is one of many."""

    name: str
    part: Part
    row: int | None


def with_lora(config: Config, weights: Weights, lora: Lora) -> tuple[Config, Merged]:
    """The weights with the changes of all files, and their config, which may have another head.

    Raises `CheckpointError` that names the file, and `ConfigError` for its config.
    """
    if config.attention not in LAYOUTS:
        raise CheckpointError(
            f"--lora is for {', '.join(LAYOUTS)}, not for {config.attention} models"
        )
    assert isinstance(weights, StoredWeights), type(weights)
    untied: Any = dataclasses.replace(config, tied=False) if is_tied(config) else config  # type: ignore[type-var]
    changes: dict[str, list[Change]] = {}
    for path in lora.files:
        reader = _AdapterFile(path, untied, lora.alpha)
        for name, change in reader.changes():
            changes.setdefault(name, []).append(change)
    if is_tied(config) and changes.keys() & {EMBEDDING, HEAD}:
        return untied, Merged(_Untied(weights), changes)
    return config, Merged(weights, changes)


def is_tied(config: Config) -> bool:
    """Whether the head is the embedding."""
    return bool(getattr(config, "tied", False))


def files_of(lora: Lora) -> list[Path]:
    """Every file that is read, for the digest. Raises `CheckpointError`."""
    weights = [_weights_file(path) for path in lora.files]
    configs = [path.with_name(ADAPTER_CONFIG) for path in weights if path.name in ADAPTER_WEIGHTS]
    return [*weights, *(path for path in configs if path.is_file())]


class _Untied(WrappedWeights):
    """``base``, whose head is the embedding, with a head that has the same numbers."""

    def __getitem__(self, name: str) -> Array:
        return super().__getitem__(_stored(name))

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        return super().rows(_stored(name), begin, end)

    def __contains__(self, name: object) -> bool:
        return name == HEAD or super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._base, HEAD])

    def __len__(self) -> int:
        return len(self._base) + 1

    def shape(self, name: str) -> Shape:
        return super().shape(_stored(name))

    def is_float(self, name: str) -> bool:
        return super().is_float(_stored(name))

    def dtype_of(self, name: str) -> str:
        return super().dtype_of(_stored(name))

    def block_kind(self, name: str) -> str | None:
        return self._base.block_kind(_stored(name))

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        return super().blocks(_stored(name), begin, end)


def _stored(name: str) -> str:
    return EMBEDDING if name == HEAD else name


def _weights_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in ADAPTER_WEIGHTS:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path} has no {' or '.join(ADAPTER_WEIGHTS)}")


class _AdapterFile:
    """One file, for the model of ``config``, which is not tied. Raises `CheckpointError`."""

    def __init__(self, path: Path, config: Config, alpha: float | None) -> None:
        self._path = path = _weights_file(path)
        if path.with_name(PISSA).is_file():
            raise CheckpointError(
                f"{path} is of PiSSA, as {PISSA} next to it shows: merge it first"
            )
        try:
            self._files = tensors_of(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        self._shapes, self._targets = config.weight_shapes(), _targets(config)
        # Some files of RWKV-7 have an embedding that was normed when they were made.
        self._is_normed = not getattr(config, "embedding_norm", True)
        self._alpha, self._config = alpha, AdapterConfig()
        self._is_peft = path.name in ADAPTER_WEIGHTS
        if self._is_peft and path.with_name(ADAPTER_CONFIG).is_file():
            self._config = read_adapter_config(path.with_name(ADAPTER_CONFIG))

    def changes(self) -> list[tuple[str, Change]]:
        """The changes by our names of the weights."""
        if not self._files:
            raise CheckpointError(f"{self._path} has no tensors")
        found: list[tuple[str, Change]] = []
        whole: list[tuple[str, Change]] = []  # which others are added to
        for key in self._files:
            for pattern, what in _REFUSED:
                if re.search(pattern, key):
                    raise CheckpointError(f"{self._path}: {key!r} is of {what}")
            match = _CHANGE.fullmatch(key)
            if match is None:
                targets = self._targets_of(key, key)
                whole += [(target.name, self._whole(key, target)) for target in targets]
            elif match["kind"] in _WITH_A:
                if not self._files.keys() & _keys_of(match["module"], "lora_A"):
                    raise CheckpointError(f"{self._path}: {key!r} has no lora_A")
            else:
                is_low_rank = match["kind"] == "lora_A"
                for target in self._targets_of(key, f"{match['module']}.weight"):
                    wanted, half = self._shapes[target.name], HALVES.get(target.part.form)
                    is_linear = target.name != EMBEDDING and len(wanted) == 2
                    if not is_linear or not (target.part.form == "same" or half is not None):
                        raise CheckpointError(f"{self._path}: {key!r} is of no Linear weight")
                    if not is_low_rank and half is not None:
                        raise CheckpointError(f"{self._path}: {key!r} is of two weights")
                    change = (
                        self._low_rank(key, wanted, half)
                        if is_low_rank
                        else self._shared(key, wanted)
                    )
                    found.append((target.name, change))
        return whole + found

    def _targets_of(self, key: str, name: str) -> list[_Target]:
        found = self._targets.get(name.removeprefix(_PEFT).replace(".base_layer.", "."))
        if found is None:
            raise CheckpointError(
                f"{self._path} has the key {key!r}, which is no weight of the model"
            )
        return found

    def _low_rank(self, key: str, wanted: Shape, half: int | None) -> Change:
        """Of a weight of shape ``wanted``: a ``half`` of the file's rows, or all of them."""
        other = "lora_B".join(key.rsplit("lora_A", 1))
        if other not in self._files:
            raise CheckpointError(f"{self._path}: {key!r} has no lora_B")
        size, width = wanted
        out = size if half is None else 2 * size
        rows = slice((half or 0) * size, ((half or 0) + 1) * size)
        rank = (self._shape(key) or (0,))[0]
        self._check(key, (max(rank, 1), width))
        self._check(other, (out, rank))
        alpha = self._config.alpha if self._config.alpha is not None else self._alpha
        if alpha is None:
            raise CheckpointError(
                f"{self._path} does not state its alpha: --lora-alpha gives it"
                " (lora_alpha of the training)"
            )
        scale = alpha / (rank**0.5 if self._config.by_root else rank)
        change = LowRankChange(self._files[key], self._files[other][rows], scale)
        module = key.rpartition(".lora_A")[0]
        lengths = self._files.keys() & _keys_of(module, "lora_magnitude_vector")
        if self._config.has_lengths and not lengths:
            raise CheckpointError(f"{self._path}: {key!r} has no lora_magnitude_vector of DoRA")
        for length in lengths:
            self._check(length, (out,))
            return DirectedChange(change, self._files[length][rows])
        return change

    def _shared(self, key: str, wanted: Shape) -> Change:
        """Of MiSS."""
        out, width = wanted
        shape = self._shape(key)
        if len(shape) == 3:
            rank = shape[-1] or 1
            by_row = self._is_peft or key.startswith(_PEFT)  # under any file name
            if width % rank or out % rank:
                raise CheckpointError(f"{self._path}: {key} is {list(shape)}, for {[out, width]}")
            self._check(key, ((out if by_row else width) // rank, rank, rank))
            return Blocks(self._files[key], by_row)
        if self._config.mini_rank is None:
            self._check(key, (min(max((shape or (0,))[0], 1), width), out))
            return Tiled(self._files[key], out)
        if out % self._config.mini_rank:
            raise CheckpointError(f"{self._path}: mini_r does not divide the {out} rows of {key}")
        self._check(key, (min(max((shape or (0,))[0], 1), width), self._config.mini_rank))
        return Tiled(self._files[key], out)

    def _whole(self, key: str, target: _Target) -> Change:
        if target.name == EMBEDDING and self._is_normed:
            raise CheckpointError(f"{self._path}: {key} is not normed, as the model's is already")
        formed = Renamed(self._files, {key: Part((key,), target.part.form)})
        wanted = self._shapes[target.name]
        wanted = wanted if target.row is None else wanted[1:]
        if formed.shape(key) != wanted:
            raise CheckpointError(
                f"{self._path}: {key} is {list(formed.shape(key))}, wanted {list(wanted)}"
            )
        self._check_float(key)
        return Whole(formed, key) if target.row is None else RowChange(formed[key], target.row)

    def _shape(self, key: str) -> Shape:
        return self._files.shape(key)

    def _check(self, key: str, wanted: Shape) -> None:
        if self._shape(key) != wanted:
            raise CheckpointError(
                f"{self._path}: {key} is {list(self._shape(key))}, wanted {list(wanted)}"
            )
        self._check_float(key)

    def _check_float(self, key: str) -> None:
        if not self._files.is_float(key):
            raise CheckpointError(f"{self._path}: {key} is of integers")


def _keys_of(module: str, kind: str) -> set[str]:
    """The keys of a part of LoRA, as RWKV-PEFT and as ``peft`` write it."""
    return {f"{module}.{kind}", f"{module}.{kind}.weight"}


def _targets(config: Config) -> Mapping[str, list[_Target]]:
    """Where the tensors of any layout are, by their keys: of which some have two weights."""
    module, function = LAYOUTS[config.attention]
    found: dict[str, list[_Target]] = {}
    for parts in getattr(import_module(module), function)(config):
        of_layout: dict[str, list[_Target]] = {}
        for name, part in parts.items():
            for row, key in enumerate(part.keys):
                target = _Target(name, part, row if len(part.keys) > 1 else None)
                of_layout.setdefault(key, []).append(target)
        found |= of_layout
    return found


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
