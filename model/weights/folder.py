"""Which files a checkpoint's weights are in, and reading them."""

from __future__ import annotations

from pathlib import Path

from model.files import read_json
from model.weights import FORMS, INDEX, WEIGHTS, CheckpointError, StoredWeights
from model.weights.gguf_file import part_paths
from model.weights.safetensors import WeightFiles
from model.weights.torch_file import TorchFiles


def read_weights(folder: Path) -> StoredWeights:
    """The weights of a checkpoint's folder, in one file or in those that an index names.

    Raises `CheckpointError`; reading a key raises it for a dtype that is unknown.
    """
    files = weight_files(folder)
    if files[0].suffix == Path(WEIGHTS).suffix:
        return WeightFiles(files)
    return TorchFiles(files)


def weight_files(folder: Path) -> list[Path]:
    """The one file, or those that the index names, in order.

    ``folder`` may be a file that is a model, then its parts.
    """
    if folder.is_file():
        return part_paths(folder)
    for one, index in FORMS:
        if (folder / one).is_file():
            return [folder / one]
        if (folder / index).is_file():
            return _indexed(folder, index)
    return _indexed(folder, INDEX)  # which raises


def _indexed(folder: Path, index: str) -> list[Path]:
    names = read_json(folder / index).get("weight_map")
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(n, str) for n in names.values())
    ):
        raise CheckpointError(f"{index} has no weight_map of file names")
    files = [folder / name for name in sorted(set(names.values()))]
    for file in files:
        if file.parent != folder:
            raise CheckpointError(f"{index} names a file outside the folder: {file.name!r}")
        if file.suffix != Path(index.removesuffix(".index.json")).suffix:
            raise CheckpointError(f"{index} names a file of another kind: {file.name!r}")
    return files
