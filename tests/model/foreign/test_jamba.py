"""Folders of Jamba against transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from model.checkpoint import CheckpointError, load_checkpoint
from model.families.jamba.config import JambaConfig
from model.files import ConfigError
from model.native.runtime import Runtime
from model.tokenizer import Tokenizer
from tests.hybrids import jamba
from tests.model.foreign.conftest import tokens
from tests.model.foreign.test_gpt2 import edit_config
from tests.model.foreign.test_hybrids import TOLERANCE, assert_rows, edit_weights
from tests.model.foreign.test_mamba2_hybrid import built, save
from tests.model.ops.cpu.models import feed, relative_error
from tests.model.ops.cpu.test_hybrids import STEP


def jamba_model(**changes: Any) -> PreTrainedModel:
    return built(jamba(vocab_size=310), **changes)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "jamba": jamba_model,
    "tied": lambda: jamba_model(tie_word_embeddings=True, num_key_value_heads=2),
    "other-sizes": lambda: jamba_model(
        attn_layer_period=2, attn_layer_offset=0, mamba_d_conv=3, rms_norm_eps=1e-5
    ),
    "automatic-rank": lambda: jamba_model(mamba_dt_rank="auto", attn_layer_period=99),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "theirs"


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, folder: Path, tokenizer: Tokenizer) -> None:
    theirs = MODELS[name]()
    loaded, ids = load_checkpoint(save(theirs, folder, tokenizer)), tokens(70)
    found, wanted = loaded.model.parallel(ids), theirs(ids).logits
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert loaded.config.max_context == theirs.config.max_position_embeddings
    assert_rows(loaded)


@pytest.mark.parametrize("name", MODELS)
def test_folder_runs_natively_as_on_torch(name: str, folder: Path, tokenizer: Tokenizer) -> None:
    """From the files' own tensors, with keys and values in float16 on both."""
    loaded, ids = load_checkpoint(save(MODELS[name](), folder, tokenizer)), tokens(70)
    runtime = Runtime(loaded.config, loaded.weights, "float32")
    found = feed(runtime, runtime.empty_pool(1), 0, ids[0].tolist())
    model, start = loaded.model, torch.zeros(1, dtype=torch.int64)
    wanted, _ = model.chunk(ids[:1], model.empty_state(1), start)
    assert relative_error(torch.from_numpy(found), wanted[0]) <= STEP


def test_published_jamba_has_more_fields(folder: Path, tokenizer: Tokenizer) -> None:
    """Of files made for AI21's own code, and the kinds of layers one by one."""
    theirs = jamba_model()
    save(theirs, folder, tokenizer)
    edit_config(
        folder,
        num_experts=None,
        num_local_experts=1,
        layers_block_type=["mamba", "mamba", "attention", "mamba"],
        mamba_inner_layernorms=True,
        calc_logits_for_entire_prompt=False,
        num_logits_to_keep=1,
        sliding_window=None,
        n_ctx=262144,
    )
    loaded, ids = load_checkpoint(folder), tokens(40)
    assert isinstance(loaded.config, JambaConfig)
    assert loaded.config.attention_layers == (2,)
    wanted = theirs(ids).logits
    torch.testing.assert_close(loaded.model.parallel(ids), wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 16}, "num_experts is not supported: only the dense ones of this family"),
        ({"num_experts": None}, "num_experts is not supported: only the dense ones of this family"),
        ({"attn_layer_offset": 4}, r"attn_layer_offset must be in 0\.\.3, not 4"),
        ({"attn_layer_offset": "2"}, r"attn_layer_offset must be in 0\.\.3, not '2'"),
        ({"attn_layer_period": 0}, "attn_layer_period must be a positive integer, not 0"),
        ({"layers_block_type": ["mamba"] * 4}, "layers_block_type says other kinds of layers"),
        ({"layers_block_type": ["mamba", "mamba", "attention"]}, "layers_block_type says other"),
        ({"layers_block_type": ["mamba", "moe"]}, "layers_block_type with experts is not supp"),
        ({"mamba_inner_layernorms": False}, "mamba_inner_layernorms False is not supported"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias True is not supported"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias False is not supported"),
        ({"mamba_dt_rank": 0}, "mamba_dt_rank must be a positive integer, not 0"),
        ({"sliding_window": 128}, "sliding_window 128 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_theta": 10_000}, "unknown field 'rope_theta'"),
    ],
)
def test_config_beyond_ours_is_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path, tokenizer: Tokenizer
) -> None:
    edit_config(save(jamba_model(), folder, tokenizer), **changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


def test_missing_norm_inside_a_mixer_is_named(folder: Path, tokenizer: Tokenizer) -> None:
    save(jamba_model(), folder, tokenizer)
    key = "model.layers.1.mamba.b_layernorm.weight"
    edit_weights(folder, lambda tensors: tensors.pop(key))
    with pytest.raises(CheckpointError, match=rf"lacks key '{key}' \(1 in all\)"):
        load_checkpoint(folder)
