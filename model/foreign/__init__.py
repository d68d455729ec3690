"""Checkpoints that others trained, read as models of ours: one file per family of layouts.

A reader takes the values of ``config.json`` and the tensors of the weight
files. It checks both strictly: what a config asks that we do not do, and a key
that is missing or unknown, is an error that names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from model.architectures.config import Config, ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.weights import Weights
from model.weights import Array

Reader = Callable[[ForeignConfig, Weights], tuple[Config, Mapping[str, Array]]]

#: ``model_type`` of config.json -> (module, function). Imported when asked for.
READERS: dict[str, tuple[str, str]] = {
    "gpt2": ("model.foreign.gpt2", "read_gpt2"),
    "llama": ("model.foreign.llama", "read_llama"),
    "gla": ("model.foreign.flash_linear_attention", "read_gla"),
    "retnet": ("model.foreign.flash_linear_attention", "read_retnet"),
    "linear_attn": ("model.foreign.flash_linear_attention", "read_linear_attn"),
    "rwkv7": ("model.foreign.rwkv7", "read_rwkv7"),
    "rwkv7_native": ("model.foreign.rwkv7", "read_rwkv7"),
    "rwkv7_hf_adapter": ("model.foreign.rwkv7", "read_rwkv7"),
}

#: Families that people will try, by why they cannot be served.
REFUSED: dict[str, tuple[str, ...]] = {
    "some of its layers are attention, whose state grows with the text": (
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "kimi_linear", "falcon_h1", "minimax"),
        *("granitemoehybrid", "nemotron_h", "jamba", "bamba", "lfm2", "plamo2", "zamba2"),
    ),
    "of this family only RWKV-7 is": ("rwkv", "rwkv5", "rwkv6", "rwkv6qwen2", "arwkv7"),
}


def refuse_unsupported(model_type: object) -> None:
    """Raises `ConfigError` for a family that is known and cannot be served."""
    for reason, families in REFUSED.items():
        if model_type in families:
            raise ConfigError(f"{model_type} models are not supported: {reason}")


def is_foreign(model_type: object) -> bool:
    """Whether there is a reader for this ``model_type``."""
    return isinstance(model_type, str) and model_type in READERS


def read(
    values: dict[str, Any], tensors: Mapping[str, Array], vocab_size: int, eos_token_id: int
) -> tuple[Config, Mapping[str, Array]]:
    """Our config and weights for a foreign config.json and the tensors of its weight files.

    ``vocab_size`` is the tokenizer's: ids above it have no text, and files hold them only to
    make a round number, so they are cut off. ``eos_token_id``, the tokenizer's too, is taken
    where the file names none. Raises `ConfigError` or `CheckpointError`; the arguments are
    not changed.
    """
    module, name = READERS[values["model_type"]]
    reader: Reader = getattr(import_module(module), name)
    for field in ("bos_token_id", "eos_token_id"):
        if values.get(field) is None:
            values = {**values, field: eos_token_id}
    source, weights = ForeignConfig(values), Weights(tensors)
    config, ours = reader(source, weights)
    source.refuse_unknown()
    weights.refuse_unknown()
    return _without_padding(config, ours, vocab_size)


def _without_padding(
    config: Config, weights: Mapping[str, Array], vocab_size: int
) -> tuple[Config, Mapping[str, Array]]:
    # What is read only when asked for stays whole; ids without text are never drawn.
    if config.vocab_size <= vocab_size or not isinstance(weights, dict):
        return config, weights
    for name in weights.keys() & {"embedding.weight", "head.weight"}:
        # Another length is refused when it is loaded.
        if weights[name].shape[:1] == (config.vocab_size,):
            weights[name] = weights[name][:vocab_size]
    return _with_vocab_size(config, vocab_size), weights


def _with_vocab_size(config: Config, vocab_size: int) -> Config:
    changed: Config = dataclasses.replace(config, vocab_size=vocab_size)  # type: ignore[type-var]
    return changed
