"""Qwen3.5 and LFM2 in GGUF, with the keys, types and order of heads of llama.cpp's converter.

Vectors and the convolution stay float32; what remains is as asked, or float16 where its rows do
not divide into blocks. Tensors are written one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFType, GGUFWriter

from model.architectures.hybrid import BoundedConfig, HybridConfig
from model.checkpoint import Checkpoint, CheckpointError
from model.export.gguf_tensors import Planned, add_dtype, write_tensors
from model.export.gguf_vocabulary import add_vocabulary
from model.export.hybrid import rope_sections
from model.export.published import published
from model.families.lfm2 import read as lfm2_read
from model.families.lfm2.config import Lfm2Config
from model.families.qwen35 import read as qwen35_read
from model.families.qwen35.config import Qwen35Config
from model.families.qwen35.gguf import CHANNELS, COLUMNS, HEADS
from model.weights import Array


def write_gguf(path: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The file, with the tokenizer and the chat template inside.

    Raises `CheckpointError` or `TokenizerError` where the format has no place for the model.
    """
    config = checkpoint.config
    assert isinstance(config, HybridConfig), config
    if not config.attention_layers:
        raise CheckpointError("llama.cpp reads no hybrid without a layer of attention")
    is_qwen = isinstance(config, Qwen35Config)
    writer = GGUFWriter(path, "qwen35" if is_qwen else "lfm2")
    add_sizes(writer, config)
    if isinstance(config, Qwen35Config):
        _add_qwen35(writer, config)
    else:
        assert isinstance(config, Lfm2Config), config
        _add_lfm2(writer, config)
    add_dtype(writer, dtype)
    add_vocabulary(writer, checkpoint)
    parts = (qwen35_read if is_qwen else lfm2_read).GGUF.parts_of(config)
    shapes = config.weight_shapes()
    planned = [
        Planned(part.keys[0], shapes[ours], ours.endswith(".conv")) for ours, part in parts.items()
    ]
    write_tensors(
        writer, planned, _in_order(published(checkpoint.weights, parts), config), checkpoint, dtype
    )


def add_sizes(writer: GGUFWriter, config: BoundedConfig) -> None:
    """Adds the metadata that all families with a bounded past have."""
    writer.add_type(GGUFType.MODEL)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)


def _add_qwen35(writer: GGUFWriter, config: Qwen35Config) -> None:
    if config.key_head_dim != config.value_head_dim:
        raise CheckpointError(
            f"GGUF implies a value_head_dim of {config.key_head_dim}, the model has"
            f" {config.value_head_dim}"
        )
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_dimension_sections([*rope_sections(config), 0])
    writer.add_ssm_conv_kernel(config.conv_size)
    writer.add_ssm_state_size(config.key_head_dim)
    writer.add_ssm_group_count(config.num_key_heads)
    writer.add_ssm_time_step_rank(config.num_value_heads)
    writer.add_ssm_inner_size(config.value_channels)
    is_recurrent = [not is_attention for is_attention in config.is_attention]
    writer.add_array("qwen35.attention.recurrent_layers", is_recurrent)


def _add_lfm2(writer: GGUFWriter, config: Lfm2Config) -> None:
    if config.num_attention_heads * config.head_dim != config.hidden_size:
        raise CheckpointError(
            f"GGUF implies a head_dim of {config.hidden_size} / {config.num_attention_heads}, the"
            f" model has {config.head_dim}"
        )
    heads = [config.num_key_value_heads * is_attention for is_attention in config.is_attention]
    writer.add_head_count_kv(heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_size)


def _in_order(
    tensors: Iterator[tuple[str, Array]], config: HybridConfig
) -> Iterator[tuple[str, Array]]:
    """With value heads in the order of the file: see `model.families.qwen35.gguf`."""
    if not isinstance(config, Qwen35Config) or config.num_key_heads == config.num_value_heads:
        yield from tensors
        return
    groups, size = config.num_key_heads, config.value_head_dim
    place = np.arange(config.num_value_heads)
    heads = place % groups * (config.num_value_heads // groups) + place // groups
    channels = (heads[:, None] * size + np.arange(size)).ravel()
    first = 2 * groups * config.key_head_dim
    for key, tensor in tensors:
        kind = key.split(".", 2)[-1]
        if kind in HEADS:
            yield key, tensor[heads]
        elif kind == COLUMNS:
            yield key, tensor[:, channels]
        elif kind in CHANNELS:
            skipped = 0 if kind == "attn_gate.weight" else first
            yield key, np.concatenate([tensor[:skipped], tensor[skipped:][channels]])
        else:
            yield key, tensor
