"""Tuned states of other projects, as a block that a session can begin with.

The reader of a family knows the names in its files and the layout of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from model.architectures.config import Config, with_state_dtype
from model.files import open_file
from model.state import StateLayout, stored_block
from model.weights import Array, CheckpointError, StoredWeights
from model.weights.safetensors import WeightFiles
from model.weights.torch_file import TorchFile

Reader = Callable[[Mapping[str, Array], str, Any], list[dict[str, Array]]]

#: ``model_type`` of our config -> (module, function). Imported when asked for.
READERS: dict[str, tuple[str, str]] = {
    "everstream-rwkv7": ("model.families.rwkv7.read", "read_time_states"),
}

#: The end of a key of a tuned state, in every family.
_KEY_END = ".time_state"
_ZIP = b"PK\x03\x04"


def read_tuned_state(path: Path, config: Config, transposed: bool = False) -> npt.NDArray[np.uint8]:
    """The state in a ``.pth`` or safetensors file, [num_bytes] uint8 as `StateLayout` has it.

    What the file does not have is zero. The matrices of a ``transposed`` one are the other way
    round than a family's usually are. Raises `CheckpointError` that names the file and what is
    wrong with it, and OSError.
    """
    if config.model_type not in READERS:
        raise CheckpointError(f"{path}: tuned states of {config.attention} models are not known")
    return state_block(tensors_of(path), path.name, config, transposed)


def state_block(
    files: Mapping[str, Array], name: str, config: Config, transposed: bool = False
) -> npt.NDArray[np.uint8]:
    """The same of the tensors of a file called ``name``. Raises `CheckpointError`."""
    module, function = READERS[config.model_type]
    reader: Reader = getattr(import_module(module), function)
    layout = StateLayout.of(with_state_dtype(config, "float32"))
    block = np.zeros(layout.num_bytes, np.uint8)
    tensors = reader(files, name, config)
    for layer, (views, given) in enumerate(zip(layout.views(block[None]), tensors, strict=True)):
        for key, values in given.items():
            if not np.isfinite(values).all():
                raise CheckpointError(f"{name}: the state of layer {layer} is not finite")
            views[key][0] = values.swapaxes(-1, -2) if transposed else values
    return stored_block(block, config)


def describe_tuned_state(path: Path) -> dict[str, str]:
    """What is in a file, for users to read, whichever family it is of.

    Raises `CheckpointError` and OSError.
    """
    files = tensors_of(path)
    if not files:
        raise CheckpointError(f"{path} has no tensors")
    # One of ours with a damaged header would be taken for tensors of bytes.
    if not all(key.endswith(_KEY_END) and files.is_float(key) for key in files):
        raise CheckpointError(f"{path} is neither a tuned state nor an undamaged one of everstream")
    shapes = sorted({files.shape(key) for key in files})
    return {
        "tensors": f"{len(files)}, {files.stored_dtype}",
        "shapes": ", ".join(str(list(shape)) for shape in shapes),
        "first key": min(files),
    }


def tensors_of(path: Path) -> StoredWeights:
    """The tensors of a ``.pth`` or safetensors file. Raises `CheckpointError` and OSError."""
    with open_file(path) as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    return TorchFile(path) if is_zip else WeightFiles([path])
