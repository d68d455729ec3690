"""Folders of hybrids over Mamba-2 against transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, PreTrainedModel

from model.checkpoint import CheckpointError, load_checkpoint
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.files import ConfigError
from model.tokenizer import Tokenizer
from tests.hybrids import granite, randomise
from tests.model.foreign.conftest import tokens
from tests.model.foreign.test_gpt2 import edit_config
from tests.model.foreign.test_hybrids import TOLERANCE, assert_rows, edit_weights

ENDS = {"bos_token_id": None, "eos_token_id": 0}


def granite_model(**changes: Any) -> PreTrainedModel:
    theirs = {**granite(vocab_size=310).theirs, **ENDS, **changes}
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**theirs))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "granite": granite_model,
    "granite-untied": lambda: granite_model(tie_word_embeddings=False, logits_scaling=8),
    "granite-attention": lambda: granite_model(
        layer_types=["full_attention"] * 4,
        position_embedding_type="rope",
        hidden_size=24,
        mamba_n_heads=6,
        mamba_d_head="auto",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "theirs"


def save(model: PreTrainedModel, folder: Path, tokenizer: Tokenizer) -> Path:
    randomise(model, one_plus=False)
    model.eval().save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, folder: Path, tokenizer: Tokenizer) -> None:
    theirs = MODELS[name]()
    loaded, ids = load_checkpoint(save(theirs, folder, tokenizer)), tokens(70)
    found, wanted = loaded.model.parallel(ids), theirs(ids).logits
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert loaded.config.max_context == theirs.config.max_position_embeddings
    assert_rows(loaded)


def test_published_granite_names_its_fields_otherwise(folder: Path, tokenizer: Tokenizer) -> None:
    """As Granite-4.0-H does: other kinds of layers, and the base of no rotary positions."""
    theirs = granite_model()
    save(theirs, folder, tokenizer)
    edit_config(
        folder,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        position_embedding_type="nope",
        normalization_function="rmsnorm",
        init_method="mup",
        rope_parameters=None,
        rope_theta=10_000,
        rope_scaling=None,
        num_experts_per_tok=0,
        router_aux_loss_coef=0.01,
        output_router_logits=False,
        time_step_limit=None,
    )
    loaded, ids = load_checkpoint(folder), tokens(40)
    assert isinstance(loaded.config, Mamba2HybridConfig)
    assert loaded.config.attention_layers == (2,) and loaded.config.rotary_dim == 0
    wanted = theirs(ids).logits
    torch.testing.assert_close(loaded.model.parallel(ids), wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 8}, "num_local_experts is not supported: only the dense ones"),
        ({"layer_types": ["mamba", "conv", "mamba", "mamba"]}, "layer_types must be a list of"),
        ({"layer_types": [["mamba"]] * 4}, "layer_types must be a list of"),
        ({"layer_types": ["mamba"] * 3}, "layer_types has 3 of 4 layers"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters of type 'yarn' is not"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias True is not supported"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias False is not supported"),
        ({"mamba_n_heads": 7}, "mamba_n_heads must divide 40, not 7"),
        ({"mamba_d_head": 10}, "mamba_d_head 10 is not supported, only 'auto' or 5"),
        ({"time_step_limit": [0.0, 0.5]}, r"time_step_limit \[0\.0, 0\.5\] is not supported"),
        ({"logits_scaling": 0}, r"logits_scaling must be positive, not 0\.0"),
        ({"residual_multiplier": -0.2}, r"residual_multiplier must be positive, not -0\.2"),
        ({"embedding_multiplier": 1e6}, "embedding_scale must be a float up to 10000"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"shared_experts": 2}, "unknown field 'shared_experts'"),
    ],
)
def test_granite_config_beyond_ours_is_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path, tokenizer: Tokenizer
) -> None:
    edit_config(save(granite_model(), folder, tokenizer), **changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


def test_missing_and_odd_halves_are_named(folder: Path, tokenizer: Tokenizer) -> None:
    save(granite_model(), folder, tokenizer)
    key = "model.layers.1.shared_mlp.input_linear.weight"
    edit_weights(folder, lambda tensors: tensors.update({key: tensors[key][:-1].clone()}))
    with pytest.raises(CheckpointError, match=r"input_linear\.weight is \[73, 20\]"):
        load_checkpoint(folder)
    edit_weights(folder, lambda tensors: tensors.pop(key))
    with pytest.raises(CheckpointError, match=rf"lacks key '{key}' \(2 in all\)"):
        load_checkpoint(folder)
