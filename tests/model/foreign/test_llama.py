"""Llama folders against transformers' own forward pass."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from model.checkpoint import CheckpointError, load_checkpoint
from model.config import ConfigError
from tests.model.foreign.conftest import Save, assert_same_logits
from tests.model.foreign.test_gpt2 import edit_config, edit_weights, reshape

#: Of Llama 3.2, for shorter texts.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(**changes: object) -> LlamaForCausalLM:
    values: dict[str, object] = {
        "vocab_size": 310,
        "hidden_size": 24,
        "intermediate_size": 40,
        "head_dim": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**values, **changes})).eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "attention_bias": True},
        {"head_dim": 10},
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rms_norm_eps": 0.1},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
        {"rope_parameters": LLAMA3},
    ],
    ids=str,
)
def test_logits_equal_transformers(save: Save, changes: dict[str, object]) -> None:
    theirs = llama(**changes)
    assert_same_logits(save(theirs), theirs, 70)


@pytest.mark.parametrize("scaling", [None, {"type": "default"}])
def test_older_file_holds_the_base_outside(save: Save, scaling: object) -> None:
    theirs = llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    folder = save(theirs)
    edit_config(folder, rope_parameters=None, rope_theta=500, rope_scaling=scaling)
    assert_same_logits(folder, theirs, 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor must be positive"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1}}, "low_freq_factor must be below"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters.factor"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta must be a number"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"rope_interleaved": True}, "rope_interleaved True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide 4, not 3"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"sliding_window": 8}, "unknown field 'sliding_window'"),
    ],
)
def test_config_beyond_ours_is_refused_by_name(
    save: Save, changes: dict[str, object], message: str
) -> None:
    folder = save(llama())
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


def test_missing_and_unknown_keys_are_named(save: Save) -> None:
    folder = save(llama())
    key = "model.layers.1.mlp.up_proj.weight"
    edit_weights(folder, {key: "model.layers.1.mlp.side_proj.weight"})
    with pytest.raises(CheckpointError, match=rf"lacks key '{key}'"):
        load_checkpoint(folder)
    edit_weights(folder, {"model.layers.1.mlp.side_proj.weight": key})
    edit_config(folder, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"unknown key 'model\.layers\.1\."):
        load_checkpoint(folder)


def test_grouped_keys_that_do_not_divide_are_refused(save: Save) -> None:
    folder = save(llama(num_key_value_heads=2))
    edit_config(folder, num_key_value_heads=1)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight is \[12, 24\], wanted \[6, 24\]"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("self_attn.q_proj", (24, 23), r"q_proj\.weight is \[24, 23\], wanted \[24, 24\]"),
        ("self_attn.k_proj", (12, 23), r"k_proj\.weight is \[12, 23\]"),
        ("self_attn.v_proj", (0, 24), r"v_proj\.weight is \[0, 24\]"),
        ("self_attn.v_proj", (), r"v_proj\.weight is \[\]"),
        ("mlp.up_proj", (40, 12), r"up_proj\.weight is \[40, 12\]"),
        ("mlp.gate_proj", (), r"gate_proj\.weight is \[\]"),
    ],
)
def test_misshapen_matrix_is_named(
    save: Save, name: str, shape: tuple[int, ...], message: str
) -> None:
    folder = save(llama(num_key_value_heads=2))
    reshape(folder, f"model.layers.1.{name}.weight", *shape)
    with pytest.raises(CheckpointError, match=rf"model\.layers\.1\..*{message}"):
        load_checkpoint(folder)


def test_file_without_end_of_text_takes_the_tokenizers(save: Save) -> None:
    folder = save(llama())
    for value, wanted in ((None, 0), ([7, 9], 7), (5, 5)):
        edit_config(folder, eos_token_id=value)
        assert load_checkpoint(folder).config.eos_token_id == wanted
