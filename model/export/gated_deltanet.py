"""Our `delta` as a gated_deltanet of flash-linear-attention: see `model.foreign`'s reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from model.attention import spec_of
from model.attention.specs import key_dim
from model.checkpoint import Checkpoint, CheckpointError
from model.config import ModelConfig
from model.export.published import write_folder
from model.weights import Array

#: Ours in an attention, and theirs.
_SAME = {
    "norm_weight": "o_norm.weight",
    "beta.weight": "b_proj.weight",
    "gate.weight": "g_proj.weight",
    "decay.weight": "a_proj.weight",
    "decay.bias": "dt_bias",
    "decay_log": "A_log",
    "out.weight": "o_proj.weight",
}


def write_hf(folder: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The folder. Raises `CheckpointError` where the config cannot say what the model computes."""
    config = checkpoint.config
    assert isinstance(config, ModelConfig), config
    options = spec_of(config.attention).values(config)
    if not options["conv_size"] or not options["decay"]:
        raise CheckpointError("a gated_deltanet has a convolution and a decay, the model has not")
    if options["channel_decay"]:
        raise CheckpointError("a gated_deltanet has one decay per head, the model one per channel")
    if (config.norm, config.mlp, config.attention_bias) != ("rms", "swiglu", False):
        raise CheckpointError("a gated_deltanet has RMS norms, a SwiGLU and no biases")
    keys = key_dim(config, options)
    if keys * (config.head_dim / keys) != config.head_dim:
        raise CheckpointError(f"no expand_v says that {keys} channels become {config.head_dim}")
    tensors = _tensors(config, checkpoint, keys)
    write_folder(folder, checkpoint, _config(config, options, keys, dtype), tensors, dtype)


def _tensors(config: ModelConfig, checkpoint: Checkpoint, keys: int) -> Iterator[tuple[str, Array]]:
    weights = checkpoint.weights
    yield "model.embeddings.weight", _float32(weights["embedding.weight"])
    yield "model.norm.weight", _float32(weights["norm.weight"])
    if not config.tie_word_embeddings:
        yield "lm_head.weight", _float32(weights["head.weight"])
    rows = config.num_attention_heads * keys
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield f"{theirs}.attn_norm.weight", _float32(weights[f"{ours}.attention_norm.weight"])
        yield f"{theirs}.mlp_norm.weight", _float32(weights[f"{ours}.mlp_norm.weight"])
        up = _float32(weights[f"{ours}.mlp.up.weight"])
        for name, part in zip(("gate", "up"), np.split(up, 2), strict=True):
            yield f"{theirs}.mlp.{name}_proj.weight", part
        yield f"{theirs}.mlp.down_proj.weight", _float32(weights[f"{ours}.mlp.down.weight"])
        qkv = _float32(weights[f"{ours}.attention.qkv.weight"])
        conv = _float32(weights[f"{ours}.attention.conv_weight"])[:, None]
        for kind, joined in (("proj", qkv), ("conv1d", conv)):
            for name, part in zip("qkv", np.split(joined, [rows, 2 * rows]), strict=True):
                yield f"{theirs}.attn.{name}_{kind}.weight", part
        for name, key in _SAME.items():
            if f"{ours}.attention.{name}" in weights:
                yield f"{theirs}.attn.{key}", _float32(weights[f"{ours}.attention.{name}"])


def _float32(tensor: Array) -> Array:
    return np.asarray(tensor, np.float32)


def _config(config: ModelConfig, options: dict[str, Any], keys: int, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["GatedDeltaNetForCausalLM"],
        "model_type": "gated_deltanet",
        "allow_neg_eigval": options["negative_eigenvalues"],
        "attn": None,
        "attn_mode": "chunk",
        "bos_token_id": config.bos_token_id,
        "conv_size": options["conv_size"],
        "eos_token_id": config.eos_token_id,
        "expand_v": config.head_dim / keys,
        "head_dim": keys,
        "hidden_act": "swish",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
        "num_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype,
        "use_gate": options["gate"],
        "use_short_conv": True,
        "vocab_size": config.vocab_size,
    }
