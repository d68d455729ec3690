from __future__ import annotations

import dataclasses

import pytest
import torch

from model.config import ConfigError, ModelConfig
from model.convert.convert import copy_shared, target_config
from model.lm import LanguageModel

SOFTMAX = ModelConfig(
    vocab_size=300,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=8,
    intermediate_size=32,
    attention="softmax",
)
LEARNED_POSITIONS = dataclasses.replace(
    SOFTMAX, attention_options={"rotary": "none"}, max_position_embeddings=16
)


def model(config: ModelConfig, seed: int = 0) -> LanguageModel:
    result = LanguageModel(config)
    result.init_weights(torch.Generator().manual_seed(seed))
    return result


def test_shared_weights_are_copied_and_the_rest_is_named_and_left() -> None:
    old, new = model(SOFTMAX), model(target_config(SOFTMAX, "performer", {}), seed=1)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    assert copy_shared(old, new) == [f"blocks.{i}.attention.projection" for i in range(2)]
    for name, tensor in new.state_dict().items():
        wanted = before[name] if name.endswith("projection") else old.state_dict()[name]
        assert torch.equal(tensor, wanted), name


def test_weight_of_another_shape_is_left() -> None:
    old, new = model(SOFTMAX), model(target_config(SOFTMAX, "retnet", {"key_dim": 4}))
    fresh = copy_shared(old, new)
    assert "blocks.0.attention.qkv.weight" in fresh
    assert "blocks.0.attention.out.weight" not in fresh


def test_biases_of_the_source_are_copied() -> None:
    config = dataclasses.replace(LEARNED_POSITIONS, attention_bias=True, norm="layer", mlp="gelu")
    old, new = model(config), model(target_config(config, "performer", {}), seed=1)
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.add_(1.0)
    fresh = copy_shared(old, new)
    assert all(name.endswith("projection") for name in fresh)
    assert torch.equal(
        new.state_dict()["blocks.1.attention.qkv.bias"],
        old.state_dict()["blocks.1.attention.qkv.bias"],
    )


BEFORE = {"rotary": "before"}
OTHER_BASE = dataclasses.replace(SOFTMAX, attention_options={"rope_theta": 5e5})


@pytest.mark.parametrize(
    ("source", "attention", "options", "wanted"),
    [
        (SOFTMAX, "performer", {}, {"rotary": "before", "rope_theta": 10_000.0}),
        (OTHER_BASE, "performer", {"features": 4}, {**BEFORE, "rope_theta": 5e5, "features": 4}),
        (SOFTMAX, "performer", {"rotary": "none"}, {"rotary": "none", "rope_theta": 10_000.0}),
        (SOFTMAX, "gated", {}, {}),
        (LEARNED_POSITIONS, "performer", {}, {"rotary": "none"}),
        (LEARNED_POSITIONS, "window_linear", {}, {"rotary": "none"}),
    ],
)
def test_target_rotates_where_the_source_does(
    source: ModelConfig, attention: str, options: dict[str, object], wanted: dict[str, object]
) -> None:
    assert target_config(source, attention, options).attention_options == wanted


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("softmax", {}, "no constant state"),
        ("lstm", {}, "'lstm' is unknown"),
        ("performer", {"feature": 4}, "attention_options.feature"),
    ],
)
def test_impossible_target_is_refused(
    attention: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        target_config(SOFTMAX, attention, options)
