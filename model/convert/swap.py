"""The weights that two models share by name and shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from model.attention import spec_of
from model.config import ModelConfig
from model.files import ConfigError
from model.lm import LanguageModel


def target_config(source: ModelConfig, attention: str, options: dict[str, Any]) -> ModelConfig:
    """``source`` with another mechanism, whose state is constant.

    The target rotates queries and keys as the source does, if it can, unless
    ``options`` say otherwise. Raises `ConfigError`.
    """
    if not isinstance(options, dict):
        raise ConfigError(f"attention_options must be an object, not {options!r}")
    target = spec_of(attention)
    if not target.constant_state:
        raise ConfigError(f"attention {attention!r} has no constant state to convert to")
    if "rotary" in target.options:
        options = {**_rotation(source), **options}
    return dataclasses.replace(source, attention=attention, attention_options=options)


def _rotation(config: ModelConfig) -> dict[str, Any]:
    """The options that say how queries and keys are rotated; only "before" is known to all."""
    options = spec_of(config.attention).values(config)
    if options.get("rotary", "none") == "none":
        return {"rotary": "none"}
    return {"rotary": "before", "rope_theta": options["rope_theta"]}


@torch.no_grad()
def copy_shared(source: LanguageModel, target: LanguageModel) -> list[str]:
    """Copies into ``target``, in place, what ``source`` has under the same name and shape.

    Returns the names of the tensors of ``target`` that have no counterpart and
    stay as they are.
    """
    weights = source.state_dict()
    fresh = []
    for name, tensor in target.state_dict().items():
        if name in weights and weights[name].shape == tensor.shape:
            tensor.copy_(weights[name])
        else:
            fresh.append(name)
    return fresh
