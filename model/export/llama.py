"""Llama, Qwen2, Qwen3 and SmolLM3 as folders that `transformers` reads, and in GGUF.

GGUF has the keys, types and rows of llama.cpp's converter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from model.checkpoint import Checkpoint, CheckpointError
from model.export.published import (
    Planned,
    add_dtype,
    add_sizes,
    add_vocabulary,
    in_pairs,
    published,
    write_folder,
    write_tensors,
)
from model.families.llama.config import LlamaConfig
from model.families.llama.read import FACTORS, FOLDER, GGUF, KINDS, unrotated_layers
from model.foreign.config import SCALINGS, Rotary
from model.weights import Array

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "bos_token_id", "eos_token_id"),
)


def write_hf(folder: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The folder. Raises `CheckpointError` for what transformers has no config for, and OSError."""
    config = checkpoint.config
    assert isinstance(config, LlamaConfig), config
    values = _config(config, dtype)
    tensors = published(checkpoint.weights, FOLDER.parts_of(config))
    write_folder(folder, checkpoint, values, tensors, dtype)


def family_of(config: LlamaConfig) -> str:
    """The ``model_type`` of a model with these options.

    Raises `CheckpointError` where no family has them together.
    """
    if config.windows:
        raise CheckpointError(
            "a Llama with windows is exported with --format everstream alone: no other format has"
            " a constant state"
        )
    biases = config.qkv_bias, config.out_bias
    if config.qk_norm or config.unrotated_layers:
        family = "smollm3" if config.unrotated_layers else "qwen3"
        is_known = biases[0] == biases[1] and not (config.qk_norm and config.unrotated_layers)
    else:
        family = "qwen2" if biases == (True, False) else "llama"
        is_known = biases != (False, True)
    if not is_known:
        names = ("qkv_bias", "out_bias", "qk_norm", "unrotated_layers")
        options = ", ".join(name for name in names if getattr(config, name))
        raise CheckpointError(f"no family that is known elsewhere has {options} alone")
    return family


def _config(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    family = family_of(config)
    values = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        **{name: getattr(config, name) for name in _SIZES},
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context,
        "pad_token_id": config.eos_token_id,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, **_scaling(config)},
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
    }
    if family != "qwen2":
        values["attention_bias"] = config.qkv_bias
    if family == "smollm3":
        layers = range(config.num_hidden_layers)
        values["no_rope_layers"] = [int(layer not in config.unrotated_layers) for layer in layers]
    return values


def _scaling(config: LlamaConfig) -> dict[str, Any]:
    """The kind of scaling whose factors the model has, with its numbers.

    Of "llama3" the numbers follow from the factors, where the lowest frequencies are divided by
    all of the factor and those between have the published bounds: the number of positions from
    one that is between.
    """
    factors = config.rope_factors
    if not factors:
        return {"rope_type": "default"}
    if all(one == other for one, other in pairwise(factors)):
        return {"rope_type": "linear", "factor": factors[0]}
    numbers = {**SCALINGS["llama3"], "factor": max(factors)}
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    for pair, factor in enumerate(factors):
        if 1.0 < factor < numbers["factor"]:
            smooth = (1 / factor - 1 / numbers["factor"]) / (1 - 1 / numbers["factor"])
            length = 2 * math.pi * config.rope_theta ** (pair / len(factors))
            positions = round(length * (smooth * (high - low) + low))
            numbers["original_max_position_embeddings"] = positions
    found = Rotary(config.rope_theta, 1.0, "llama3", numbers).factors(config.head_dim)
    if not np.allclose(found, factors, rtol=1e-5, atol=0):
        raise CheckpointError("the rope_factors are those of no scaling that transformers has")
    return {"rope_type": "llama3", **numbers}


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
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    add_dtype(writer, dtype)
    add_vocabulary(writer, checkpoint)
    parts, shapes = GGUF.parts_of(config), config.weight_shapes()
    planned = [Planned(part.keys[0], shapes[ours]) for ours, part in parts.items()]
    tensors = published(checkpoint.weights, parts)
    if KINDS[family].in_pairs:
        tensors = in_pairs(tensors, config.head_dim)
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


def _with_factors(
    tensors: Iterator[tuple[str, Array]], config: LlamaConfig
) -> Iterator[tuple[str, Array]]:
    yield FACTORS, np.array(config.rope_factors, np.float32)
    yield from tensors
