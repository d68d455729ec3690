"""A folder of Hugging Face's kind: config, weights, the tokenizer's file and its settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from model.chat.template import PLAIN, TOKENIZER_CONFIG
from model.checkpoint import Checkpoint, save_tokenizer
from model.checkpoint_files import CONFIG
from model.weights import WEIGHTS, Array


def write_folder(
    folder: Path,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Array]],
    dtype: str,
) -> None:
    """The folder; ``config`` and the keys of ``tensors`` are theirs. Raises OSError."""
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
    kind: torch.dtype = getattr(torch, dtype)
    return {key: torch.from_numpy(np.array(tensor, order="C")).to(kind) for key, tensor in tensors}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
