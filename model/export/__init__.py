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

_HYBRID_GGUF = ("model.export.hybrid", "write_gguf")
_MAMBA = {"hf": ("model.export.mamba", "write_hf"), "gguf": ("model.export.mamba", "write_gguf")}
_MAMBA_HYBRID = {"gguf": ("model.export.mamba_hybrids", "write_gguf")}
_LLAMA = {"hf": ("model.export.llama", "write_hf"), "gguf": ("model.export.llama", "write_gguf")}
#: ``attention`` of our config -> kind of file -> (module, function). Imported when asked for.
WRITERS: dict[str, dict[str, tuple[str, str]]] = {
    "rwkv7": {
        "pth": ("model.export.rwkv7", "write_pth"),
        "hf": ("model.export.rwkv7", "write_hf"),
        "gguf": ("model.export.rwkv7", "write_gguf"),
    },
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "qwen35": {"hf": ("model.export.hybrid", "write_qwen35"), "gguf": _HYBRID_GGUF},
    "lfm2": {"hf": ("model.export.hybrid", "write_lfm2"), "gguf": _HYBRID_GGUF},
    "lfm3": {"hf": ("model.export.hybrid", "write_lfm3")},
    "mamba2_hybrid": _MAMBA_HYBRID,
    "jamba": _MAMBA_HYBRID,
    "llama": _LLAMA,
    "delta": {"hf": ("model.export.gated_deltanet", "write_hf")},
}


def writer_of(checkpoint: Checkpoint, kind: str) -> Writer:
    """What writes a model as ``kind``. Raises `CheckpointError` where that has no such form."""
    family = checkpoint.config.attention
    known = WRITERS.get(family, {})
    if kind not in known:
        raise CheckpointError(f"--format {kind} is not supported for {family} models")
    module, name = known[kind]
    writer: Writer = getattr(import_module(module), name)
    return writer
