"""The files that are a model: their names, and those of weight changes that it is loaded with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from model.files import open_file
from model.weights import CheckpointError
from model.weights.rwkv_cpp import MAGIC

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
