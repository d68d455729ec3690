"""Llama, Qwen2, Qwen3 and SmolLM3 in GGUF, with the keys, types and rows of llama.cpp's converter.

Vectors stay float32; what remains is as asked, or float16 where its rows do not divide into blocks.
Tensors are written one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from model.checkpoint import Checkpoint, CheckpointError
from model.export.gguf_tensors import Planned, add_dtype, write_tensors
from model.export.gguf_vocabulary import add_vocabulary
from model.export.hybrid_gguf import add_sizes
from model.export.llama import family_of
from model.export.published import published
from model.families.llama.config import LlamaConfig
from model.families.llama.gguf import FACTORS, KINDS, unrotated_layers
from model.families.llama.read import GGUF
from model.weights import Array


def write_gguf(path: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The file, with the tokenizer and the chat template inside.

    Raises `CheckpointError` or `TokenizerError` where the format has no place for the model.
    """
    config = checkpoint.config
    assert isinstance(config, LlamaConfig), config
    family = family_of(config)
    _check(config, family)
    writer = GGUFWriter(path, family)
    add_sizes(writer, config)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    add_dtype(writer, dtype)
    add_vocabulary(writer, checkpoint)
    parts, shapes = GGUF.parts_of(config), config.weight_shapes()
    planned = [Planned(part.keys[0], shapes[ours]) for ours, part in parts.items()]
    tensors = published(checkpoint.weights, parts)
    if KINDS[family].in_pairs:
        tensors = _in_pairs(tensors, config.head_dim)
    if config.rope_factors:
        planned.insert(0, Planned(FACTORS, (config.head_dim // 2,)))
        tensors = _with_factors(tensors, config)
    write_tensors(writer, planned, tensors, checkpoint, dtype)


def _check(config: LlamaConfig, family: str) -> None:
    """Raises `CheckpointError` for what readers of the family's files do not look for."""
    if family in ("qwen3", "smollm3") and config.qkv_bias:
        raise CheckpointError(f"GGUF has no biases of {family}")
    implied = unrotated_layers(config.num_hidden_layers)
    if config.unrotated_layers and config.unrotated_layers != implied:
        raise CheckpointError(
            f"GGUF implies unrotated_layers {list(implied)}, the model has"
            f" {list(config.unrotated_layers)}"
        )


def _in_pairs(tensors: Iterator[tuple[str, Array]], head_dim: int) -> Iterator[tuple[str, Array]]:
    """With the rows of q and k that turn together next to each other."""
    for key, tensor in tensors:
        if ".attn_q." in key or ".attn_k." in key:
            halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        yield key, tensor


def _with_factors(
    tensors: Iterator[tuple[str, Array]], config: LlamaConfig
) -> Iterator[tuple[str, Array]]:
    yield FACTORS, np.array(config.rope_factors, np.float32)
    yield from tensors
