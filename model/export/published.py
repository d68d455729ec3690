"""Weights as published files have them, and folders of Hugging Face's kind around them.

Keys and forms reverse `model.foreign.weights`, but for halves and factors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model.chat import PLAIN, TOKENIZER_CONFIG
from model.checkpoint import Checkpoint, CheckpointError, save_tokenizer
from model.checkpoint_files import CONFIG
from model.foreign.weights import HALVES, Part
from model.tensor_spec import Shape
from model.weights import WEIGHTS, Array

if TYPE_CHECKING:
    import torch


def published(
    weights: Mapping[str, Array],
    parts: Mapping[str, Part],
    shape_of: Callable[[str, Shape], Shape] = lambda name, shape: shape,
) -> Iterator[tuple[str, Array]]:
    """The tensors by the keys of ``parts``, float32, each read when it is its turn.

    ``shape_of`` has the shape in the file, by our name and shape.
    """
    for ours, part in parts.items():
        assert part.form not in HALVES and part.factor == 1.0, part
        tensor = _stored(np.asarray(weights[ours], np.float32), part.form)
        yield part.keys[0], tensor.reshape(shape_of(ours, tensor.shape))


def _stored(tensor: Array, form: str) -> Array:
    if form == "log_negative":
        return -np.exp(tensor)
    return tensor - np.float32(1) if form == "plus_one" else tensor


def with_middle_axis(name: str, shape: Shape) -> Shape:
    """Folders have a convolution's weight as [C, 1, W]."""
    return (shape[0], 1, shape[1]) if name.endswith(".conv") else shape


def refuse_others(form: str, name: str, wanted: float, found: float) -> None:
    """Raises `CheckpointError` where a value is not the one that a format implies."""
    if not math.isclose(found, wanted, rel_tol=1e-6):
        raise CheckpointError(f"{form} implies {name} {wanted:g}, the model has {found:g}")


def write_folder(
    folder: Path,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Array]],
    dtype: str,
) -> None:
    """The folder; ``config`` and the keys of ``tensors`` are theirs. Raises OSError."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(of_dtype(tensors, dtype), folder / WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / CONFIG, config)
    save_tokenizer(folder, checkpoint.tokenizer)
    template = checkpoint.chat_template
    settings: dict[str, Any] = dict(template.special_tokens)
    if template.source != PLAIN:
        settings["chat_template"] = template.source
    if template.tool_use is not None:
        named = {"default": template.source, "tool_use": template.tool_use}
        settings["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    _write_json(folder / TOKENIZER_CONFIG, settings)


def of_dtype(tensors: Iterable[tuple[str, Array]], dtype: str) -> dict[str, torch.Tensor]:
    """As torch has them, in the type of that name."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return {key: torch.from_numpy(np.array(tensor, order="C")).to(kind) for key, tensor in tensors}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
