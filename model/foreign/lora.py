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
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from model.architectures.config import Config
from model.checkpoint_files import ADAPTER_CONFIG, Lora
from model.foreign.adapters import (
    AdapterConfig,
    Blocks,
    Change,
    DirectedChange,
    LowRankChange,
    Merged,
    RowChange,
    Tiled,
    Whole,
    read_adapter_config,
)
from model.foreign.renamed import HALVES, Part, Renamed
from model.foreign.tuned_states import tensors_of
from model.tensor_spec import Shape
from model.weights import Array, CheckpointError, StoredWeights, Weights, WrappedWeights

#: ``attention`` of a config -> (module, function) that has the keys of each layout of the family's
#: files, as a `Part` by our names.
LAYOUTS: dict[str, tuple[str, str]] = {
    "rwkv7": ("model.families.rwkv7.read", "key_layouts"),
    "arwkv7": ("model.families.arwkv7.read", "key_layouts"),
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
