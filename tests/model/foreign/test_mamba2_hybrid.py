"""Folders of hybrids over Mamba-2 against transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from model.checkpoint import CheckpointError, load_checkpoint
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.files import ConfigError
from model.native.runtime import Runtime
from model.tokenizer import Tokenizer
from tests.hybrids import Hybrid, falcon, granite, granite3, nemotron, randomise
from tests.model.foreign.conftest import tokens
from tests.model.foreign.test_gpt2 import edit_config
from tests.model.foreign.test_hybrids import TOLERANCE, assert_rows, edit_weights
from tests.model.ops.cpu.models import feed, relative_error
from tests.model.ops.cpu.test_hybrids import STEP

ENDS = {"bos_token_id": None, "eos_token_id": 0}


def built(hybrid: Hybrid, **changes: Any) -> PreTrainedModel:
    return replace(hybrid, theirs={**hybrid.theirs, **ENDS, **changes}).build()


def granite_model(**changes: Any) -> PreTrainedModel:
    return built(granite(vocab_size=310), **changes)


def granite3_model(**changes: Any) -> PreTrainedModel:
    return built(granite3(vocab_size=310), **changes)


def nemotron_model(**changes: Any) -> PreTrainedModel:
    return built(nemotron(vocab_size=310), **changes)


def falcon_model(**changes: Any) -> PreTrainedModel:
    return built(falcon(vocab_size=310), **changes)


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
    "granite3": granite3_model,
    "granite3-untied": lambda: granite3_model(tie_word_embeddings=False, num_key_value_heads=2),
    "nemotron": nemotron_model,
    "nemotron-other": lambda: nemotron_model(n_groups=2, conv_kernel=3, layer_norm_epsilon=1e-6),
    "falcon-h1": falcon_model,
    "falcon-h1-tied": lambda: falcon_model(tie_word_embeddings=True, mamba_d_head="auto"),
    "falcon-h1-normed": lambda: falcon_model(mamba_rms_norm=True, ssm_multipliers=None),
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


@pytest.mark.parametrize("name", MODELS)
def test_folder_runs_natively_as_on_torch(name: str, folder: Path, tokenizer: Tokenizer) -> None:
    """From the files' own tensors, with keys and values in float16 on both."""
    loaded, ids = load_checkpoint(save(MODELS[name](), folder, tokenizer)), tokens(70)
    runtime = Runtime(loaded.config, loaded.weights, "float32")
    found = feed(runtime, runtime.empty_pool(1), 0, ids[0].tolist())
    model, start = loaded.model, torch.zeros(1, dtype=torch.int64)
    wanted, _ = model.chunk(ids[:1], model.empty_state(1), start)
    assert relative_error(torch.from_numpy(found), wanted[0]) <= STEP


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


def test_published_granite_3_is_read(folder: Path, tokenizer: Tokenizer) -> None:
    """The fields of Granite-3.1."""
    theirs = granite3_model()
    save(theirs, folder, tokenizer)
    edit_config(
        folder,
        attention_bias=False,
        attention_dropout=0.1,
        initializer_range=0.02,
        mlp_bias=False,
        rope_parameters=None,
        rope_scaling=None,
        rope_theta=10000.0,
        torch_dtype="bfloat16",
        use_cache=True,
    )
    loaded, ids = load_checkpoint(folder), tokens(40)
    assert isinstance(loaded.config, Mamba2HybridConfig)
    assert loaded.config.attention_layers == (0, 1, 2) and not any(loaded.config.is_mamba)
    wanted = theirs(ids).logits
    torch.testing.assert_close(loaded.model.parallel(ids), wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["granite3", "granite3-untied"])
def test_granite_3_writes_the_greedy_tokens_of_transformers(
    name: str, folder: Path, tokenizer: Tokenizer
) -> None:
    theirs = MODELS[name]()
    loaded, prompt = load_checkpoint(save(theirs, folder, tokenizer)), tokens(44)[:1]
    with torch.no_grad():
        text = theirs.generate(
            prompt, min_new_tokens=200, max_new_tokens=200, do_sample=False, pad_token_id=0
        )
    assert text.shape[1] == 244
    logits = loaded.model.parallel(text)[0, 43:-1]
    logits[:, 0] = -torch.inf  # the end, which was put off
    assert logits.argmax(dim=-1).tolist() == text[0, 44:].tolist()
    assert len(set(text[0, 44:].tolist())) > 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"logits_scaling": 0}, r"granite: logits_scaling must be positive, not 0\.0"),
        ({"attention_multiplier": -1}, r"attention_multiplier must be positive, not -1\.0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters of type 'yarn' is not"),
        ({"num_local_experts": 8}, "granite: unknown field 'num_local_experts'"),
        ({"intermediate_size": None}, "granite: intermediate_size is missing"),
    ],
)
def test_granite_3_config_beyond_ours_is_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path, tokenizer: Tokenizer
) -> None:
    edit_config(save(granite3_model(), folder, tokenizer), **changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


def test_published_nemotron_names_its_fields_otherwise(folder: Path, tokenizer: Tokenizer) -> None:
    """As Nemotron-H does: a pattern of letters, another prefix, and what predicts more tokens."""
    theirs = nemotron_model()
    save(theirs, folder, tokenizer)

    def published(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace("model.", "backbone.", 1)] = tensors.pop(key)
        tensors["mtp.layers.0.enorm.weight"] = torch.ones(20)

    edit_weights(folder, published)
    edit_config(
        folder,
        layers_block_type=None,
        layer_types=None,
        hybrid_override_pattern="M-*M-",
        num_hidden_layers=5,
        head_dim=None,
        attention_head_dim=12,
        layer_norm_epsilon=None,
        rms_norm_eps=1e-5,
        expand=2,
        rope_theta=10_000,
        num_nextn_predict_layers=1,
    )
    loaded, ids = load_checkpoint(folder), tokens(40)
    assert isinstance(loaded.config, Mamba2HybridConfig)
    assert (loaded.config.attention_layers, loaded.config.mamba_layers) == ((2,), (0, 3))
    wanted = theirs(ids).logits
    torch.testing.assert_close(loaded.model.parallel(ids), wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layers_block_type": ["mamba", "moe", "mlp", "mamba", "mlp"]},
            "with experts is not supp",
        ),
        ({"hybrid_override_pattern": "ME*M-"}, "hybrid_override_pattern with experts is not supp"),
        ({"hybrid_override_pattern": "M-?M-"}, "hybrid_override_pattern must be a list of 'mamba'"),
        ({"hybrid_override_pattern": "MM*MM"}, "must have a layer that is an mlp"),
        ({"hybrid_override_pattern": "M-*M"}, "hybrid_override_pattern has 4 of 5 layers"),
        ({"mlp_hidden_act": "silu"}, "hidden_act 'silu' is not supported, only 'relu2'"),
        ({"use_bias": True}, "use_bias True is not supported"),
        ({"sliding_window": 128}, "sliding_window 128 is not supported"),
        ({"n_groups": 4}, "num_groups must divide 6 heads, not 4"),
        (
            {"layers_block_type": ["mamba", "mlp"], "hybrid_override_pattern": "MM"},
            "hybrid_override_pattern says other kinds of layers than layers_block_type",
        ),
    ],
)
def test_nemotron_config_beyond_ours_is_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path, tokenizer: Tokenizer
) -> None:
    save(nemotron_model(), folder, tokenizer)
    pattern = dict.fromkeys(("layers_block_type", "layer_types", "hybrid_override_pattern"))
    kinds = ["mamba", "mlp", "attention", "mamba", "mlp"]
    edit_config(folder, **{**pattern, "num_hidden_layers": 5})
    if not changes.keys() & pattern.keys():
        changes = {**changes, "layers_block_type": kinds}
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate is not"),
        ({"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers must be 5 numbers, not"),
        ({"mlp_multipliers": [1.0, "2"]}, "mlp_multipliers must be a number, not '2'"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp False is not supported"),
        ({"projectors_bias": True}, "projectors_bias True is not supported"),
        ({"attn_layer_indices": [1]}, r"attn_layer_indices \[1\] is not supported"),
        ({"mamba_d_ssm": 30}, "mamba_n_heads must divide 30, not 4"),
    ],
)
def test_falcon_h1_config_beyond_ours_is_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path, tokenizer: Tokenizer
) -> None:
    edit_config(save(falcon_model(), folder, tokenizer), **changes)
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
