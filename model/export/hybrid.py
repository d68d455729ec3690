"""Qwen3.5, LFM2 and LFM3 as folders that `transformers` reads, the first two in GGUF too.

A folder of Qwen3.5 is its text model alone. GGUF has the keys, types and order of heads of
llama.cpp's converter; vectors and the convolution stay float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from model.architectures.hybrid import HybridConfig
from model.checkpoint import Checkpoint, CheckpointError
from model.export.published import (
    Planned,
    add_dtype,
    add_sizes,
    add_vocabulary,
    published,
    with_middle_axis,
    write_folder,
    write_tensors,
)
from model.families.lfm2 import read as lfm2_read
from model.families.lfm2.config import Lfm2Config
from model.families.lfm2.read import FOLDER
from model.families.lfm3 import read as lfm3_read
from model.families.lfm3.config import Lfm3Config
from model.families.qwen35 import read as qwen35_read
from model.families.qwen35.config import Qwen35Config, Qwen35MtpConfig
from model.families.qwen35.read import CHANNELS, COLUMNS, HEADS, folder_names, mtp_names
from model.weights import Array


def write_qwen35(folder: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The folder, with a multi-token head. Norms are stored less one. Raises OSError."""
    config = checkpoint.config
    assert isinstance(config, Qwen35Config), config
    parts = folder_names("model.").parts_of(config)
    tensors, head = published(checkpoint.weights, parts, with_middle_axis), checkpoint.head
    values = _qwen35_config(config, dtype)
    if head is not None:
        assert isinstance(head.config, Qwen35MtpConfig), head
        drafting = published(head.weights, mtp_names().parts_of(head.config), with_middle_axis)
        tensors, values = chain(tensors, drafting), {**values, "mtp_num_hidden_layers": 1}
    write_folder(folder, checkpoint, values, tensors, dtype)


def write_lfm2(folder: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The folder. Raises OSError."""
    config = checkpoint.config
    assert isinstance(config, Lfm2Config), config
    tensors = published(checkpoint.weights, FOLDER.parts_of(config), with_middle_axis)
    write_folder(folder, checkpoint, _lfm2_config(config, dtype), tensors, dtype)


def write_lfm3(folder: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The folder. Raises OSError."""
    config = checkpoint.config
    assert isinstance(config, Lfm3Config), config
    parts = lfm3_read.folder_names().parts_of(config)
    tensors = published(checkpoint.weights, parts, with_middle_axis)
    write_folder(folder, checkpoint, _lfm3_config(config, dtype), tensors, dtype)


def rope_sections(config: Qwen35Config) -> list[int]:
    """Pairs of rotary channels that turn with time, height and width; in texts these are equal."""
    half = config.rotary_dim // 2
    return [(half + 2 - axis) // 3 for axis in range(3)]


def _qwen35_config(config: Qwen35Config, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **_shared(config, dtype, qwen35_read.KINDS),
        "attention_bias": False,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": config.conv_size,
        "linear_key_head_dim": config.key_head_dim,
        "linear_num_key_heads": config.num_key_heads,
        "linear_num_value_heads": config.num_value_heads,
        "linear_value_head_dim": config.value_head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": rope_sections(config),
            "partial_rotary_factor": _part(config.rotary_dim, config.head_dim),
            "rope_theta": config.rope_theta,
            "rope_type": "default",
        },
    }


def _lfm2_config(config: Lfm2Config, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        **_shared(config, dtype, lfm2_read.KINDS),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": config.conv_size,
        "conv_bias": False,
        "norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
    }


def _lfm3_config(config: Lfm3Config, dtype: str) -> dict[str, Any]:
    kinds = dict.fromkeys(config.attention_layers, lfm3_read.FULL)
    kinds |= dict.fromkeys(config.window_layers, lfm3_read.WINDOW)
    layers = range(config.num_hidden_layers)

    def rope(theta: float, rotary_dim: int) -> dict[str, Any]:
        part = {"partial_rotary_factor": _part(rotary_dim, config.head_dim)}
        turns_all = rotary_dim == config.head_dim
        kind = {"rope_type": "default"} if turns_all else {"rope_type": "proportional", **part}
        return {**kind, "rope_theta": theta}

    return {
        "architectures": ["Lfm3ForCausalLM"],
        "model_type": "lfm3",
        **_shared(config, dtype, lfm2_read.KINDS),
        "conv_L_cache": config.conv_size,
        "conv_bias": False,
        "layer_types": [kinds.get(layer, lfm3_read.CONVOLUTION) for layer in layers],
        "norm_eps": config.norm_eps,
        "rope_parameters": {
            lfm3_read.FULL: rope(config.rope_theta, config.rotary_dim),
            lfm3_read.WINDOW: rope(config.window_rope_theta, config.window_rotary_dim),
        },
        "sliding_window": config.window,
        "use_attention_gate": config.head_gates,
        "use_cache": bool(kinds),
        "use_sandwich_norm": config.post_norms,
    }


def _shared(config: HybridConfig, dtype: str, kinds: tuple[str, str]) -> dict[str, Any]:
    names = ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "head_dim"]
    names += ["num_attention_heads", "num_key_value_heads", "bos_token_id", "eos_token_id"]
    return {
        **{name: getattr(config, name) for name in names},
        "layer_types": [kinds[is_attention] for is_attention in config.is_attention],
        "max_position_embeddings": config.max_context,
        "pad_token_id": config.eos_token_id,
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
        # transformers has no cache for a model without attention.
        "use_cache": bool(config.attention_layers),
    }


def _part(size: int, whole: int) -> float:
    """The factor by which ``whole`` becomes ``size``, where readers round down."""
    factor = size / whole
    return factor if int(whole * factor) == size else math.nextafter(factor, 1.0)


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
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_freq_base(config.rope_theta)
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
    """With value heads in the order of the file: see `model.families.qwen35.read`."""
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
