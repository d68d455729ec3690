"""A model in a folder that is an adapter over a base: a GGUF file of others, and what was trained.

The folder has ``config.json``, which takes the place of the base's own; ``base.json``
(`model.hub.base`); and ``adapter.safetensors``, by our names of the weights W:

- ``W``: a whole tensor, in the place of the base's or one that the base does not have;
- ``blocks.N.KIND.a`` [r, in] and ``.b`` [out, r]: W + scale B A (Hu et al. 2021, section 4.1). The
  rows of B are those of the weights in `_STACKED`, which share A. The metadata has ``scale``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from model.architectures import config_from_dict
from model.architectures.config import Config
from model.checkpoint_files import ADAPTER, CONFIG
from model.files import read_json
from model.foreign import read_gguf
from model.foreign.lora import LowRankChange, Merged
from model.tensor_spec import Shape
from model.weights import Array, CheckpointError, StoredWeights, WrappedWeights, check_weights
from model.weights.gguf_file import GgufFile
from model.weights.safetensors import WeightFiles

#: The kinds of updates: the weights of a block whose rows are one below the other in B.
_STACKED = {
    "mixer.qkv": ("mixer.q", "mixer.k", "mixer.v"),
    "mixer.out": ("mixer.out",),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
    "mlp.down": ("mlp.down",),
}
_UPDATE = re.compile(r"(blocks\.\d+)\.(\w+\.\w+)\.[ab]")


class Adapted(NamedTuple):
    """The model, and the base's file, which has the tokenizer."""

    config: Config
    weights: StoredWeights
    base: GgufFile


def read_adapted(folder: Path, base: Path) -> Adapted:
    """The model of ``folder`` over the file ``base``.

    Raises `CheckpointError` or `ConfigError` that names the file and the key.
    """
    config, file = config_from_dict(read_json(folder / CONFIG)), GgufFile(base)
    adapter, shapes = WeightFiles([folder / ADAPTER]), config.weight_shapes()
    changes = dict(_changes(adapter, shapes, _scale(folder / ADAPTER)))
    _, source = read_gguf(file, base.name)
    whole = [name for name in adapter if name in shapes]
    merged = Merged(source, changes)
    weights = _Joined(merged, adapter, whole, f"{ADAPTER} over {base.name}")
    check_weights(config, weights)
    return Adapted(config, weights, file)


class _Joined(WrappedWeights):
    """``base`` with the tensors ``whole`` of ``own`` in the place of its own or as further ones."""

    def __init__(
        self, base: StoredWeights, own: StoredWeights, whole: list[str], name: str
    ) -> None:
        super().__init__(base)
        self._own, self.name = own, name
        self._sources = dict.fromkeys(base, base) | dict.fromkeys(whole, own)

    def __getitem__(self, name: str) -> Array:
        return self._sources[name][name]

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        return self._sources[name].rows(name, begin, end)

    def release(self) -> None:
        super().release()
        self._own.release()

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def shape(self, name: str) -> Shape:
        return self._sources[name].shape(name)

    def is_float(self, name: str) -> bool:
        return self._sources[name].is_float(name)

    def dtype_of(self, name: str) -> str:
        return self._sources[name].dtype_of(name)

    def block_kind(self, name: str) -> str | None:
        return self._sources[name].block_kind(name)

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        return self._sources[name].blocks(name, begin, end)


def _changes(
    adapter: WeightFiles, shapes: Mapping[str, Shape], scale: float | None
) -> Iterator[tuple[str, list[LowRankChange]]]:
    """The update of each weight that has one. Raises `CheckpointError` that names the key."""
    for key in sorted(adapter.keys() - shapes.keys()):
        match = _UPDATE.fullmatch(key)
        stacked = _STACKED.get(match[2], ()) if match else ()
        names = [f"{match[1]}.{name}.weight" for name in stacked] if match else []
        if not names or not shapes.keys() >= set(names):
            raise CheckpointError(f"{ADAPTER} has an unknown key {key!r}")
        a, b = f"{key[:-1]}a", f"{key[:-1]}b"
        for other in (a, b):
            if other not in adapter:
                raise CheckpointError(f"{ADAPTER} has {key!r} and lacks {other!r}")
        if scale is None:
            raise CheckpointError(f"{ADAPTER} has updates and no scale in its metadata")
        if twice := adapter.keys() & set(names):
            raise CheckpointError(f"{ADAPTER} has {key!r} and the whole of {min(twice)!r}")
        if key == b:  # with its A
            continue
        rank, width = (adapter.shape(a) or (0,))[0], shapes[names[0]][1]
        _check(adapter, a, (max(1, rank), width))
        _check(adapter, b, (sum(shapes[name][0] for name in names), rank))
        first, rows = 0, adapter[b]
        for name in names:
            end = first + shapes[name][0]
            yield name, [LowRankChange(adapter[a], rows[first:end], scale)]
            first = end


def _check(adapter: WeightFiles, name: str, wanted: Shape) -> None:
    if adapter.shape(name) != wanted:
        found = list(adapter.shape(name))
        raise CheckpointError(f"{ADAPTER}: {name} is {found}, wanted {list(wanted)}")
    if not adapter.is_float(name):
        raise CheckpointError(f"{ADAPTER}: {name} is of integers")


def _scale(path: Path) -> float | None:
    """The factor of all updates, of the metadata; None where it has none."""
    with safe_open(path, "numpy") as file:
        text = (file.metadata() or {}).get("scale")
    if text is None:
        return None
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        raise CheckpointError(f"{ADAPTER}: scale must be a number, not {text!r:.80}")
    return scale
