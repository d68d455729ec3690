"""What is tuned of an RWKV-7: LoRA and MiSS files, merged into the weights, and states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.architectures.config import Config
from model.checkpoint_files import Lora
from model.families.rwkv7.config import Rwkv7Config
from model.families.rwkv7.read import LAYOUTS, parts_of
from model.foreign.adapters import (
    ADAPTER_CONFIG,
    AdapterConfig,
    Blocks,
    Change,
    LowRankChange,
    Merged,
    RowChange,
    Tiled,
    Whole,
    read_adapter_config,
)
from model.foreign.renamed import Part, Renamed
from model.foreign.tuned_states import tensors_of
from model.tensor_spec import Shape
from model.weights import Array, CheckpointError, StoredWeights, Weights, shape_in

# -------------------------------------------------------------------------------------------------
# LoRA and MiSS files for RWKV-7, merged into the weights while these are read.
#
# For a Linear weight W [out, in] and a rank r:
#
# - LoRA (Hu et al. 2021, section 4.1): A [r, in] and B [out, r] give W + (alpha / r) B A.
# - MiSS (Kang 2024, arXiv 2409.15371), called Bone and DiSHA before: D [r, out] gives
#   W[o, i] + D[i mod r, o].
# - Its form "bat": D [n, r, r] turns each block W_ab [r, r] into W_ab + W_ab D_c + D_c. In files of
#   RWKV-PEFT c is the block's column b, in those of the package ``peft`` it is the row a.
#
# A file may have whole tensors too, which replace the model's: RWKV-PEFT trains norms in this way.
# Its files are ``.pth`` by native names. The package ``peft`` writes a folder with
# ``adapter_config.json``; its keys begin with ``base_model.model``.


#: What a folder of the package ``peft`` calls its tensors.
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
#: RWKV-PEFT writes it next to the files of PiSSA, whose tensors have the names of LoRA's.
PISSA = "init_pissa.pth"

_PEFT = "base_model.model."
_CHANGE = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|disha|bone|miss_block|bone_block)(\.weight)?"
)
#: Kinds of files that are known and cannot be merged.
_REFUSED = (
    (r"init_lora_[AB]$", "the initial matrices of PiSSA; merge them with RWKV-PEFT"),
    (r"lora_magnitude_vector", "DoRA, which is not supported"),
    (r"lora_embedding_[AB]", "LoRA of an embedding, which is not supported"),
    (r"\.lora_E$", "AdaLoRA, which is not supported"),
    (r"\.(lokr|hada|oft|vera|boft)_", "a method that is not supported, only LoRA and MiSS"),
    (r"\.att\.time_state$", "a tuned state: --state NAME=FILE takes it"),
)


@dataclass(frozen=True)
class _Target:
    """Where a key's tensor is: the name of ours, and which of its rows where it is one of many."""

    name: str
    part: Part
    row: int | None


def with_lora(config: Config, weights: Weights, lora: Lora) -> Merged:
    """The weights with the changes of all files.

    Raises `CheckpointError` that names the file, and `ConfigError` for its config.
    """
    if not isinstance(config, Rwkv7Config):
        raise CheckpointError(f"--lora is for RWKV-7, not for {config.attention} models")
    assert isinstance(weights, StoredWeights), type(weights)
    changes: dict[str, list[Change]] = {}
    for path in lora.files:
        reader = _AdapterFile(path, config, lora.alpha)
        for name, change in reader.changes():
            changes.setdefault(name, []).append(change)
    return Merged(weights, changes)


def files_of(lora: Lora) -> list[Path]:
    """Every file that is read, for the digest. Raises `CheckpointError`."""
    weights = [_weights_file(path) for path in lora.files]
    configs = [path.with_name(ADAPTER_CONFIG) for path in weights if path.name in ADAPTER_WEIGHTS]
    return [*weights, *(path for path in configs if path.is_file())]


def _weights_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in ADAPTER_WEIGHTS:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path} has no {' or '.join(ADAPTER_WEIGHTS)}")


class _AdapterFile:
    """One file. ``changes`` raises `CheckpointError`."""

    def __init__(self, path: Path, config: Rwkv7Config, alpha: float | None) -> None:
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
        self._has_embedding_norm = config.embedding_norm
        self._alpha, self._config = alpha, AdapterConfig()
        self._is_peft = path.name in ADAPTER_WEIGHTS
        if self._is_peft and path.with_name(ADAPTER_CONFIG).is_file():
            self._config = read_adapter_config(path.with_name(ADAPTER_CONFIG))

    def changes(self) -> list[tuple[str, Change]]:
        """The changes by our names of the weights."""
        if not self._files:
            raise CheckpointError(f"{self._path} has no tensors")
        found: list[tuple[str, Change]] = []
        for key in self._files:
            for pattern, what in _REFUSED:
                if re.search(pattern, key):
                    raise CheckpointError(f"{self._path}: {key!r} is of {what}")
            match = _CHANGE.fullmatch(key)
            if match is None:
                target = self._target(key, key)
                found.append((target.name, self._whole(key, target)))
            elif match["kind"] != "lora_B":
                target = self._target(key, f"{match['module']}.weight")
                if target.part.form != "same" or target.name == "embedding.weight":
                    raise CheckpointError(f"{self._path}: {key!r} is of no Linear weight")
                wanted = self._shapes[target.name]
                if len(wanted) != 2:
                    raise CheckpointError(f"{self._path}: {key!r} is of no Linear weight")
                low_rank = match["kind"] == "lora_A"
                make = self._low_rank if low_rank else self._shared
                found.append((target.name, make(key, wanted)))
            elif key.replace("lora_B", "lora_A") not in self._files:
                raise CheckpointError(f"{self._path}: {key!r} has no lora_A")
        return found

    def _target(self, key: str, name: str) -> _Target:
        found = self._targets.get(name.removeprefix(_PEFT))
        if found is None:
            raise CheckpointError(
                f"{self._path} has the key {key!r}, which is no weight of the model"
            )
        return found

    def _low_rank(self, key: str, wanted: Shape) -> Change:
        other = "lora_B".join(key.rsplit("lora_A", 1))
        if other not in self._files:
            raise CheckpointError(f"{self._path}: {key!r} has no lora_B")
        out, width = wanted
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
        return LowRankChange(self._files[key], self._files[other], scale)

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
        if target.name == "embedding.weight" and not self._has_embedding_norm:
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


def _targets(config: Rwkv7Config) -> Mapping[str, _Target]:
    """Where the tensors of any layout are, by their keys."""
    return {
        key: _Target(name, part, row if len(part.keys) > 1 else None)
        for names in LAYOUTS
        for name, part in parts_of(config, names).items()
        for row, key in enumerate(part.keys)
    }


# -------------------------------------------------------------------------------------------------
# A tuned state of RWKV-7: the tensors ``blocks.I.att.time_state`` [H, N, N] of state tuning.
#
# State tuning trains what the time mix of each layer begins with, and leaves the weights as they
# are. The file has that matrix alone; the token shifts begin with zeros. For RWKV-7 it is the
# kernel's own initial state, with values as rows and keys as columns, so S_ours[key, value] is its
# transpose. RWKV-PEFT writes it so since the sixth of February 2025; its versions of the two days
# before, and programs that give the matrix to flash-linear-attention as it is, have keys as rows.
# (Programs for RWKV-5 and RWKV-6 transpose the file's matrix when they load it.)
#
# RWKV-PEFT can also write such a state into the file of the weights.


KEY, END = "blocks.{}.att.time_state", ".att.time_state"


def merged_states(files: Mapping[str, Array]) -> dict[str, Array]:
    """The matrices that are in a file of weights, where a tuned state was merged into it."""
    return {key: files[key] for key in files if key.endswith(END)}


def time_states(layers: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The matrices of a published file for each layer's S [H, N, N] as [key, value]."""
    return {
        KEY.format(layer): np.ascontiguousarray(tensors["S"].transpose(0, 2, 1))
        for layer, tensors in enumerate(layers)
    }


def read_time_states(
    files: Mapping[str, Array], name: str, config: Rwkv7Config
) -> list[dict[str, Array]]:
    """Each layer's S [H, N, N] as [key, value], float32, out of a file called ``name``.

    Raises `CheckpointError` where it is a state of a model of another shape.
    """
    heads, dim = config.num_attention_heads, config.head_dim
    wanted = {KEY.format(layer) for layer in range(config.num_hidden_layers)}
    found = {key for key in files if key.endswith(END)}
    if not found:
        raise CheckpointError(f"{name} is not a tuned state: it has no key {KEY.format(0)!r}")
    if left := sorted(set(files) - found):
        raise CheckpointError(f"{name} has an unknown key {left[0]!r} ({len(left)} in all)")
    if found != wanted:
        raise CheckpointError(
            f"{name} is a state of {len(found)} layers, and the model has {len(wanted)}"
        )
    for key in sorted(wanted):
        shape = shape_in(files, key)
        if shape != (heads, dim, dim):
            raise CheckpointError(
                f"{name}: {key} is {list(shape)}, and the model has {[heads, dim, dim]}"
            )
    return [
        {"S": np.asarray(files[KEY.format(layer)], np.float32).transpose(0, 2, 1)}
        for layer in range(config.num_hidden_layers)
    ]
