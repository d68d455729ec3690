"""Models in the files of other projects: a function per family and kind of file.

A writer takes the path, the checkpoint and the dtype of the weights, and reads the tensors one
at a time where its format allows that.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from model.checkpoint import Checkpoint, CheckpointError

Writer = Callable[[Path, Checkpoint, str], None]

_MAMBA = {
    "gguf": ("model.export.mamba_gguf", "write_gguf"),
    "hf": ("model.export.mamba", "write_hf"),
}
#: ``model_type`` of ours -> kind of file -> (module, function). Imported when asked for.
WRITERS: dict[str, dict[str, tuple[str, str]]] = {
    "everstream-rwkv7": {
        "gguf": ("model.export.rwkv7_gguf", "write_gguf"),
        "hf": ("model.export.rwkv7", "write_hf"),
        "pth": ("model.export.rwkv7", "write_pth"),
    },
    "everstream-mamba": _MAMBA,
    "everstream-mamba2": _MAMBA,
}


def writer_of(checkpoint: Checkpoint, kind: str) -> Writer:
    """What writes a model as ``kind``. Raises `CheckpointError` where that has no such form."""
    config = checkpoint.config
    known = WRITERS.get(config.model_type, {})
    if kind not in known:
        raise CheckpointError(f"--format {kind} is not supported for {config.attention} models")
    module, name = known[kind]
    writer: Writer = getattr(import_module(module), name)
    return writer
