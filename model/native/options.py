"""The options of a model for the extension module: one function per family that it covers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from model.architectures.config import Config
from model.architectures.rwkv7.config import Rwkv7Config
from model.attention import spec_of
from model.attention.spec import key_dim
from model.config import ModelConfig
from model.state import StateLayout

Options = dict[str, str | float]


def covers(config: Config) -> bool:
    """Whether there are kernels for the family of ``config``, of which some may not be built."""
    return config.model_type in _FAMILIES


def native_options(config: Config, layout: StateLayout) -> Options:
    """What the extension module knows of a model that is covered, by the names that it uses."""
    return _FAMILIES[config.model_type](config, layout)


def _rwkv7_options(config: Rwkv7Config, layout: StateLayout) -> Options:
    return {
        "family": "rwkv7",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "decay_rank": config.decay_rank,
        "rate_rank": config.rate_rank,
        "value_rank": config.value_rank,
        "gate_rank": config.gate_rank,
        "embedding_norm": int(config.embedding_norm),
        "eps": config.norm_eps,
        "group_eps": config.group_norm_eps,
        "state_bytes": layout.num_bytes,
    }


def _block_options(config: ModelConfig, layout: StateLayout) -> Options:
    spec = spec_of(config.attention)
    options = spec.values(config)
    state = spec.state_spec(config)
    sums = state["S"] if "S" in state else state["sum"]
    mechanism, feature_map = config.attention, "product"
    if mechanism == "performer" and options["map"] == "simplified":
        mechanism = "performer_simplified"
    elif "map" in options and mechanism == "normed":
        feature_map = options["map"]
    rotary = options.get("rotary", "none")
    if options.get("positions", "none") != "none":
        rotary = "before"
    return {
        "family": "block",
        "mechanism": mechanism,
        "rotary": rotary,
        "map": feature_map,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "key_dim": key_dim(config, options),
        "head_dim": config.head_dim,
        "num_features": sums.shape[1],
        "intermediate_size": config.intermediate_size,
        "window": options.get("window", 0),
        "conv_size": options.get("conv_size", 0),
        "decay_rank": options.get("decay_rank", 0),
        "epoch": options.get("horizon", 2) // 2,
        "beta": options.get("beta", 1.0),
        "eps": config.rms_norm_eps,
        "rope_theta": options.get("rope_theta", 10_000.0),
        "layer_norm": config.norm == "layer",
        "gelu": config.mlp == "gelu",
        "attention_bias": config.attention_bias,
        "delta_decay": options.get("decay", False),
        "xpos": options.get("positions") == "xpos",
        "tied": config.tie_word_embeddings,
        "max_positions": config.max_position_embeddings,
        "state_bytes": layout.num_bytes,
    }


_FAMILIES: Mapping[str, Callable[[Any, StateLayout], Options]] = {
    ModelConfig.model_type: _block_options,
    Rwkv7Config.model_type: _rwkv7_options,
}
