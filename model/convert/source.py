"""A trained model as our own block with softmax attention, which is what `convert` starts from."""

from __future__ import annotations

import numpy as np

from model.architectures.network import model_of
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.families.llama.config import LlamaConfig
from model.files import ConfigError
from model.lm import LanguageModel
from model.weights import Array, Weights

#: Our block's names of a Llama's weights, without the block's.
_NAMES = {
    "attention_norm.weight": "mixer_norm.weight",
    "mlp_norm.weight": "mlp_norm.weight",
    "mlp.down.weight": "mlp.down.weight",
    "attention.out.weight": "mixer.out.weight",
    "attention.out.bias": "mixer.out.bias",
}


def as_block(checkpoint: Checkpoint) -> LanguageModel:
    """The model, in float32.

    Grouped keys and values of a Llama are repeated for each of their queries: the same function,
    with more weights. Raises `ConfigError` for a model of another family, or one with options that
    our block does not have.
    """
    config = checkpoint.config
    if isinstance(config, LlamaConfig):
        block, weights = _block_config(config), checkpoint.weights
        model = model_of(
            block, {name: _weight(name, weights, config) for name in block.weight_shapes()}
        )
    else:
        model = checkpoint.model
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"models of {config.attention} can be trained and served, not converted")
    return model


def _block_config(config: LlamaConfig) -> ModelConfig:
    others = ("qk_norm", "rope_factors", "unrotated_layers")
    for name in others:
        if getattr(config, name):
            raise ConfigError(f"models with {name} can be served, not converted")
    if config.qkv_bias != config.out_bias:
        raise ConfigError("models with biases in a part of attention can be served, not converted")
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        attention="softmax",
        attention_options={"rope_theta": config.rope_theta},
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        attention_bias=config.qkv_bias,
    )


def _weight(name: str, weights: Weights, config: LlamaConfig) -> Array:
    """A weight of our block by its name."""
    if not name.startswith("blocks."):
        return weights[name]
    prefix, layer, part = name.split(".", 2)
    theirs = f"{prefix}.{layer}."
    if part == "mlp.up.weight":
        return np.concatenate([weights[f"{theirs}mlp.{each}.weight"] for each in ("gate", "up")])
    if part.startswith("attention.qkv."):
        kind = part.rsplit(".", 1)[1]
        q, k, v = (weights[f"{theirs}mixer.{each}.{kind}"] for each in "qkv")
        return np.concatenate([q, *(_repeated(each, config) for each in (k, v))])
    return weights[theirs + _NAMES[part]]


def _repeated(rows: Array, config: LlamaConfig) -> Array:
    """Each head of keys or values as often as it has queries."""
    heads = rows.reshape(config.num_key_value_heads, config.head_dim, *rows.shape[1:])
    group = config.num_attention_heads // config.num_key_value_heads
    repeated: Array = np.repeat(heads, group, axis=0).reshape(-1, *rows.shape[1:])
    return repeated
