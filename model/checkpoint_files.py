"""The files that are a model: their names, which of them have its weights, and changes of these."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from model.files import open_file, read_json
from model.weights import FORMS, INDEX, WEIGHTS, CheckpointError, StoredWeights
from model.weights.gguf_file import part_paths
from model.weights.rwkv_cpp import MAGIC
from model.weights.safetensors import WeightFiles
from model.weights.torch_file import TorchFiles

CONFIG = "config.json"
#: The config of folders in Mistral's own layout.
PARAMS = "params.json"
CONFIGS = (CONFIG, PARAMS)
#: What was trained, in a folder that is an adapter over a base (`model.adapted`).
ADAPTER = "adapter.safetensors"
#: What the package ``peft`` writes next to the changes of a model.
ADAPTER_CONFIG = "adapter_config.json"
#: End the names of files that are a model without a folder: native RWKV files, of torch or of
#: safetensors, and GGUF.
TORCH_SUFFIX, ST_SUFFIX, GGUF_SUFFIX = FILE_SUFFIXES = (".pth", ".st", ".gguf")
#: The same of rwkv.cpp. Others end so too, so what a file begins with counts as well.
RWKV_CPP_SUFFIX = ".bin"


class Lora(NamedTuple):
    """Files of weight changes, merged in their order; a folder is one of the package ``peft``.

    ``alpha`` is that of LoRA files that do not state theirs, as those of RWKV-PEFT.
    `model.foreign.lora` reads them.
    """

    files: tuple[Path, ...] = ()
    alpha: float | None = None


NO_LORA = Lora()


def config_file(folder: Path) -> Path:
    """The config of ``folder``, by the name that is there; `CONFIG` where both are, or none."""
    is_mistral = (folder / PARAMS).is_file() and not (folder / CONFIG).exists()
    return folder / (PARAMS if is_mistral else CONFIG)


def is_model_file(path: Path) -> bool:
    """Whether ``path`` is a model without a folder. Raises `CheckpointError`: see `is_readable`."""
    if path.suffix in FILE_SUFFIXES:
        return is_readable(path)
    if path.suffix != RWKV_CPP_SUFFIX or not is_readable(path):
        return False
    with open_file(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def is_readable(path: Path) -> bool:
    """Whether the file is there. Raises `CheckpointError` where it is and cannot be read."""
    try:
        open_file(path).close()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return True


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
