"""Qwen3.5 and LFM2 folders against transformers' own forward pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Lfm2Config as TheirLfm2Config,
)
from transformers import (
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

from model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from model.config import ConfigError
from model.families.lfm2.config import Lfm2Config
from model.families.qwen35.config import Qwen35Config
from model.foreign import refuse_config
from model.tokenizer import Tokenizer
from model.weights import StoredWeights
from tests.hybrids import lfm2, qwen35, randomise
from tests.model.foreign.conftest import tokens
from tests.model.foreign.test_gpt2 import edit_config

#: Of float32 sums over the depth of the models, which transformers adds up in another order.
TOLERANCE = 1e-3
ENDS = {"bos_token_id": None, "eos_token_id": 0}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 20,
    "patch_size": 2,
    "num_position_embeddings": 16,
}


def text_model(**changes: Any) -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_text(**changes)))


def _text(**changes: Any) -> dict[str, Any]:
    return {**qwen35(vocab_size=310, **changes).theirs, **ENDS}


def multimodal(tied: bool = False) -> PreTrainedModel:
    config = Qwen3_5Config(
        text_config=_text(num_value_heads=4, tied=tied),
        vision_config=VISION,
        tie_word_embeddings=tied,
        **ENDS,
    )
    return Qwen3_5ForConditionalGeneration(config)


def lfm2_model(**changes: Any) -> PreTrainedModel:
    theirs = {**lfm2(vocab_size=310).theirs, **ENDS, "bos_token_id": 1, **changes}
    return Lfm2ForCausalLM(TheirLfm2Config(**theirs))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen35": text_model,
    "qwen35-untied": lambda: text_model(tied=False, num_value_heads=4, rope_theta=500.0),
    "qwen35-multimodal": multimodal,
    "qwen35-multimodal-tied": lambda: multimodal(tied=True),
    "lfm2": lfm2_model,
    "lfm2-untied": lambda: lfm2_model(tie_word_embeddings=False, conv_L_cache=4),
    "lfm2-adjusted": lambda: lfm2_model(block_auto_adjust_ff_dim=True, block_multiple_of=8),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "theirs"


def save(model: PreTrainedModel, folder: Path, tokenizer: Tokenizer) -> Path:
    randomise(model, one_plus=not isinstance(model, Lfm2ForCausalLM))
    model.eval().save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


def edit_weights(folder: Path, change: Any) -> None:
    """``change`` gets the tensors by name, to change in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, folder: Path, tokenizer: Tokenizer) -> None:
    theirs = MODELS[name]()
    loaded, ids = load_checkpoint(save(theirs, folder, tokenizer)), tokens(70)
    found, wanted = loaded.model.parallel(ids), theirs(ids).logits
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert loaded.config.max_context == theirs.config.get_text_config().max_position_embeddings
    assert loaded.config.bos_token_id == (0 if name.startswith("qwen") else 1)


@pytest.mark.parametrize("name", ["qwen35-untied", "lfm2"])
def test_rows_are_those_of_the_whole(name: str, folder: Path, tokenizer: Tokenizer) -> None:
    checkpoint = load_checkpoint(save(MODELS[name](), folder, tokenizer))
    assert_rows(checkpoint)


def assert_rows(checkpoint: Checkpoint) -> None:
    weights = checkpoint.weights
    assert isinstance(weights, StoredWeights)
    for key in weights:
        whole = weights[key]
        for begin, end in ((0, 1), (1, 3), (2, None), (0, len(whole))):
            assert (weights.rows(key, begin, end) == whole[begin:end]).all(), key


def test_interval_says_which_layers_are_attention(folder: Path, tokenizer: Tokenizer) -> None:
    theirs = text_model()
    save(theirs, folder, tokenizer)
    for interval in (None, 4):
        edit_config(folder, layer_types=None, full_attention_interval=interval or 4)
        config = load_checkpoint(folder).config
        assert isinstance(config, Qwen35Config) and config.attention_layers == (3,)


def test_older_lfm2_names_its_fields_otherwise(folder: Path, tokenizer: Tokenizer) -> None:
    """As LFM2-1.2B does: indices of attention, ``block_ff_dim``, the base outside."""
    theirs = lfm2_model(block_auto_adjust_ff_dim=True, block_multiple_of=4)
    values = json.loads(save(theirs, folder, tokenizer).joinpath("config.json").read_text())
    for name in ("layer_types", "rope_parameters", "tie_word_embeddings"):
        del values[name]
    values |= {"full_attn_idxs": [2], "rope_theta": 1e4, "tie_embedding": True, "theta": None}
    values |= {"block_ff_dim": values["intermediate_size"], "block_dim": 20, "conv_dim": 20}
    values |= {"block_use_swiglu": True, "use_pos_enc": True, "num_heads": 2}
    del values["theta"]
    values["intermediate_size"] = 1
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    ids = tokens(40)
    found = load_checkpoint(folder)
    torch.testing.assert_close(
        found.model.parallel(ids), theirs(ids).logits, rtol=TOLERANCE, atol=TOLERANCE
    )
    assert isinstance(found.config, Lfm2Config) and found.config.intermediate_size == 24


def test_several_tokens_ahead_and_a_second_head_are_left_out(
    folder: Path, tokenizer: Tokenizer
) -> None:
    save(multimodal(tied=True), folder, tokenizer)
    wanted = load_checkpoint(folder).model.parallel(tokens(10))

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["mtp.fc.weight"] = torch.ones(20, 40)
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()

    edit_weights(folder, add)
    assert torch.equal(load_checkpoint(folder).model.parallel(tokens(10)), wanted)
    edit_weights(folder, lambda tensors: tensors["lm_head.weight"].mul_(2.0))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding, though"):
        load_checkpoint(folder)


def test_files_converted_for_mlx_are_refused(folder: Path, tokenizer: Tokenizer) -> None:
    save(text_model(), folder, tokenizer)

    def turn(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if "conv1d" in key]:
            tensors[key] = tensors[key].transpose(1, 2).contiguous()

    edit_weights(folder, turn)
    with pytest.raises(CheckpointError, match=r"conv1d\.weight is \[44, 4, 1\], as .* for MLX"):
        load_checkpoint(folder)


def test_fields_of_published_folders_that_say_nothing_pass(
    folder: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen3.6 and Unsloth write them."""
    save(text_model(), folder, tokenizer)
    wanted = load_checkpoint(folder).config
    unsloth = {"model_name": "unsloth/x", "unsloth_fixed": True, "unsloth_version": "2026.5.3"}
    nothing = dict.fromkeys(("quantization_config", "tie_word_embeddings", "rope_scaling"))
    edit_config(folder, output_gate_type="swish", fuse_cross_entropy=True, **unsloth, **nothing)
    with caplog.at_level("INFO", "everstream.models"):
        assert load_checkpoint(folder).config == wanted
    (line,) = caplog.messages
    names = "fuse_cross_entropy, model_name, unsloth_fixed, unsloth_version"
    assert line == f"qwen3_5_text: fields of training or of programs: {names}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"attn_output_gate": False}, "attn_output_gate False"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]"),
        ({"num_experts": 8}, "unknown field 'num_experts'"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantised by 'awq' are not"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' is not supported"),
        ({"layer_types": ["conv"] * 4}, "layer_types must be a list of 'linear_attention' and"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 of 4 layers"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters of type 'yarn'"),
        ({"rope_parameters": {"factor": 2.0}}, "unknown field rope_parameters.factor"),
        ({"linear_num_value_heads": 3}, "num_key_heads must divide 3, not 2"),
    ],
)
def test_qwen35_config_beyond_ours_is_refused_by_name(
    folder: Path, tokenizer: Tokenizer, changes: dict[str, Any], message: str
) -> None:
    edit_config(save(text_model(), folder, tokenizer), **changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": 1}, "text_config must be an object, not 1"),
        ({"text_config": {"model_type": "qwen3_5_moe_text"}}, "text_config.model_type 'qwen3_5_mo"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, text_config's is not"),
        ({"audio_config": {}}, "unknown field 'audio_config'"),
    ],
)
def test_multimodal_config_beyond_ours_is_refused_by_name(
    folder: Path, tokenizer: Tokenizer, changes: dict[str, Any], message: str
) -> None:
    edit_config(save(multimodal(), folder, tokenizer), **changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_bias": True}, "conv_bias True"),
        ({"block_use_swiglu": False}, "block_use_swiglu False"),
        ({"use_pos_enc": False}, "use_pos_enc False"),
        ({"sliding_window": 8}, "unknown field 'sliding_window'"),
        ({"layer_types": None, "full_attn_idxs": [7]}, "attention_layers must be in"),
        ({"layer_types": None, "full_attn_idxs": "2"}, "full_attn_idxs must be a list"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary"),
    ],
)
def test_lfm2_config_beyond_ours_is_refused_by_name(
    folder: Path, tokenizer: Tokenizer, changes: dict[str, Any], message: str
) -> None:
    edit_config(save(lfm2_model(), folder, tokenizer), **changes)
    if changes.get("layer_types", "") is None:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        del values["layer_types"]
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["qwen35", "lfm2"])
def test_missing_and_unknown_keys_are_named(name: str, folder: Path, tokenizer: Tokenizer) -> None:
    save(MODELS[name](), folder, tokenizer)
    key = "model.layers.1.mlp.up_proj.weight"
    key = key if name == "qwen35" else "model.layers.1.feed_forward.w3.weight"

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.side.weight"] = tensors.pop(key)

    edit_weights(folder, rename)
    with pytest.raises(CheckpointError, match=rf"lacks key '{key}'"):
        load_checkpoint(folder)

    def both(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key] = tensors["model.side.weight"].clone()

    edit_weights(folder, both)
    with pytest.raises(CheckpointError, match=r"unknown key 'model\.side\.weight'"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("qwen3_5_moe", "only the dense ones of this family are"),
        ("lfm2_moe", "only the dense ones of this family are"),
        ("lfm2_vl", "of this family only LFM2, LFM2.5 and LFM3 that are dense and read text are"),
        ("lfm3_moe", "of this family only LFM2, LFM2.5 and LFM3 that are dense and read text are"),
    ],
)
def test_other_members_of_the_families_are_refused(family: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{family} models are not supported: {why}"):
        refuse_config({"model_type": family})
