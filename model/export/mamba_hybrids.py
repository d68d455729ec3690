"""Granite, Nemotron-H, Falcon-H1 and Jamba in GGUF.

GGUF has the keys, types and rows of llama.cpp's converter, but for Granite's logits: what divides
them is part of the last norm already. Vectors, norms, convolutions and A stay float32.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from model.architectures.hybrid import HybridConfig
from model.checkpoint import Checkpoint, CheckpointError
from model.export.mamba import STAY_FLOAT32, add_mixer_sizes, gguf_shape
from model.export.published import (
    Planned,
    add_dtype,
    add_sizes,
    add_vocabulary,
    in_pairs,
    published,
    refuse_others,
    write_tensors,
)
from model.families.jamba import read as jamba_read
from model.families.jamba.config import JambaConfig
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.mamba2_hybrid.read import gguf_names
from model.foreign.hybrid_names import HybridNames
from model.tensor_spec import Shape
from model.weights import Array

#: Attention and a Mamba-2 in one layer.
BOTH = (True, True)
#: The families in whose files the rows of q and k that turn together are next to each other.
IN_PAIRS = ("granite", "granitehybrid", "nemotron_h")


def write_gguf(path: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The file, with the tokenizer and the chat template inside.

    Raises `CheckpointError` or `TokenizerError` where the format has no place for the model.
    """
    config = checkpoint.config
    assert isinstance(config, Mamba2HybridConfig | JambaConfig), config
    family = family_of(config)
    writer = GGUFWriter(path, family)
    add_sizes(writer, config)
    heads = [config.num_key_value_heads * is_attention for is_attention in config.is_attention]
    writer.add_head_count_kv(heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if family != "granite":
        add_mixer_sizes(writer, config.mamba)
    if isinstance(config, Mamba2HybridConfig):
        _add_mamba2_hybrid(writer, config, family)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    add_dtype(writer, dtype)
    add_vocabulary(writer, checkpoint)

    def shape_of(name: str, shape: Shape) -> Shape:
        return gguf_shape(config.mamba, name, shape)

    parts, shapes = _names(family).parts_of(config), config.weight_shapes()
    planned = []
    for ours, part in parts.items():
        key = part.keys[0]
        stays = STAY_FLOAT32.search(key) is not None
        planned.append(Planned(key, shape_of(ours, shapes[ours]), stays))
    tensors = _in_rows(published(checkpoint.weights, parts, shape_of), config, family)
    write_tensors(writer, planned, tensors, checkpoint, dtype)


def family_of(config: Mamba2HybridConfig | JambaConfig) -> str:
    """The ``general.architecture`` of a model with these layers.

    Raises `CheckpointError` where none has all that the config says.
    """
    if not config.attention_layers:
        raise CheckpointError("llama.cpp reads no hybrid without a layer of attention")
    inner_size = 2 * config.hidden_size  # llama.cpp asserts it of two of them
    if isinstance(config, JambaConfig):
        refuse_others("GGUF", "inner_size", inner_size, config.inner_size)
        return "jamba"
    kinds = set(zip(config.is_attention, config.is_mamba, strict=True))
    if kinds == {BOTH}:
        _check(config, "falcon-h1", has_scales=False, has_positions=True)
        return "falcon-h1"
    if BOTH in kinds:
        raise CheckpointError("GGUF has no model with both mixers in some of its layers alone")
    if not config.ends_with_mlp:
        _check(config, "nemotron_h", has_scales=False, has_positions=False)
        refuse_others("GGUF", "embedding_scale", 1.0, config.embedding_scale)
        return "nemotron_h"
    family = "granitehybrid" if any(config.is_mamba) else "granite"
    _check(config, family, has_scales=True, has_positions=config.rotary_dim > 0)
    if family == "granitehybrid":
        name = "num_mamba_heads * mamba_head_dim"
        refuse_others("GGUF", name, inner_size, config.mamba.inner_size)
    return family


def _check(
    config: Mamba2HybridConfig, family: str, *, has_scales: bool, has_positions: bool
) -> None:
    """Raises `CheckpointError` for what readers of the family's files do not look for."""
    rotary_dim = config.head_dim if has_positions else 0
    refuse_others("GGUF", "rotary_dim", rotary_dim, config.rotary_dim)
    if family in IN_PAIRS and config.head_dim % 2:
        raise CheckpointError(f"GGUF implies an even head_dim, the model has {config.head_dim}")
    if family in ("granitehybrid", "nemotron_h") and not config.mixer_norm:
        raise CheckpointError(f"GGUF implies a mixer_norm in {family}, the model has none")
    if not has_scales:
        usual = config.head_dim**-0.5
        refuse_others("GGUF", "residual_scale", 1.0, config.residual_scale)
        refuse_others("GGUF", "attention_scale", usual, config.attention_scale or usual)


def _names(family: str) -> HybridNames:
    if family == "jamba":
        return jamba_read.GGUF
    return gguf_names(mlp_norm="ffn_norm") if family == "falcon-h1" else gguf_names()


def _add_mamba2_hybrid(writer: GGUFWriter, config: Mamba2HybridConfig, family: str) -> None:
    inner: int | list[int] = config.intermediate_size
    if family == "nemotron_h":  # layers of MLPs are those with a width
        has_mixer = map(operator.or_, config.is_attention, config.is_mamba)
        inner = [0 if mixes else config.intermediate_size for mixes in has_mixer]
    writer.add_feed_forward_length(inner)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    if family == "falcon-h1":
        return
    writer.add_rope_scaling_finetuned(config.rotary_dim > 0)  # whether there are positions
    if family == "nemotron_h":
        writer.add_layer_norm_eps(config.norm_eps)  # llama.cpp asks for both
    else:
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_residual_scale(config.residual_scale)
        writer.add_logit_scale(1.0)
        if config.attention_scale:
            writer.add_attention_scale(config.attention_scale)


def _in_rows(
    tensors: Iterator[tuple[str, Array]], config: HybridConfig, family: str
) -> Iterator[tuple[str, Array]]:
    """With rows of q and k and with numbers as the family's files have them."""
    if family in IN_PAIRS:
        return in_pairs(tensors, config.head_dim)
    return _scaled(tensors, config) if isinstance(config, Mamba2HybridConfig) else tensors


def _scaled(
    tensors: Iterator[tuple[str, Array]], config: Mamba2HybridConfig
) -> Iterator[tuple[str, Array]]:
    """With embeddings times their scale, of which files of Falcon-H1 say nothing.

    Where the head is the embedding, the last norm takes the scale back.
    """
    scale = np.float32(config.embedding_scale)
    for key, tensor in tensors:
        if key == "token_embd.weight":
            yield key, tensor * scale
        elif key == "output_norm.weight" and config.tied:
            yield key, tensor / scale
        else:
            yield key, tensor
