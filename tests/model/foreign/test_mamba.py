"""Mamba folders of `transformers` and of state-spaces are the models of their weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from model.config import ConfigError
from model.families.mamba.config import Mamba2Config, MambaConfig
from tests.mamba import (
    CODESTRAL,
    SHAPES,
    Published,
    drawn,
    own_names,
    published,
    theirs,
    write_mistral,
)
from tests.rwkv7 import write_fla
from tests.tiny import tiny_tokenizer

#: Theirs is float32 too.
TOLERANCE = 1e-4


def write_theirs(folder: Path, name: str, **change: Any) -> Path:
    """A folder as `transformers` writes it; ``change`` has other values of the config."""
    theirs(name).save_pretrained(folder)
    tiny_tokenizer().save(folder / "tokenizer.json")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= change
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def own_config(name: str, **change: Any) -> dict[str, Any]:
    """The ``config.json`` of state-spaces; ``change`` has other values of ``ssm_cfg``."""
    config = SHAPES[name]
    ssm: dict[str, Any] = {"layer": "Mamba2", "d_state": config.state_size}
    if isinstance(config, MambaConfig):
        ssm = {}
    elif isinstance(config, Mamba2Config):
        ssm |= {"headdim": config.head_dim, "d_conv": config.conv_size}
        ssm |= {"ngroups": config.num_groups}
    return {
        "d_model": config.hidden_size,
        "d_intermediate": 0,
        "n_layer": config.num_hidden_layers,
        "vocab_size": config.vocab_size - 3,
        "ssm_cfg": ssm | change,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 10,
        "tie_embeddings": config.tied,
    }


def write_own(
    folder: Path,
    name: str,
    config: dict[str, Any],
    change: Callable[[Published], Any] | None = None,
) -> Path:
    weights = own_names(published(drawn(name)))
    if change is not None:
        weights = change(weights)
    return write_fla(folder, weights, config, form="pytorch_model.bin")


def same(found: Checkpoint, name: str) -> None:
    assert found.config == SHAPES[name]
    assert set(found.weights) == set(drawn(name))
    for key, wanted in drawn(name).items():
        assert np.array_equal(found.weights[key], wanted), key


@pytest.mark.parametrize("name", SHAPES)
def test_folder_of_transformers_is_the_same_model(tmp_path: Path, name: str) -> None:
    loaded = load_checkpoint(write_theirs(tmp_path, name))
    same(loaded, name)
    tokens = torch.arange(2, 60)[None]
    wanted = theirs(name)(tokens).logits
    torch.testing.assert_close(
        loaded.model.parallel(tokens), wanted, rtol=TOLERANCE, atol=TOLERANCE
    )


@pytest.mark.parametrize("name", ["odd", "head", "grouped", "first"])
def test_folder_of_state_spaces_is_the_same_model(tmp_path: Path, name: str) -> None:
    """Whose weights are a file of torch, and whose tokenizer is elsewhere."""
    tiny_tokenizer().save(tmp_path / "elsewhere.json")
    folder = write_own(tmp_path / "own", name, own_config(name))
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json .*; --tokenizer FILE names"):
        load_checkpoint(folder)
    same(load_checkpoint(folder, tokenizer=tmp_path / "elsewhere.json"), name)


def test_keys_of_codestral_have_a_prefix(tmp_path: Path) -> None:
    folder = write_theirs(tmp_path, "grouped")
    (folder / "model.safetensors").unlink()
    prefixed = {f"model.{key}": t for key, t in own_names(published(drawn("grouped"))).items()}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    same(load_checkpoint(write_fla(folder, prefixed, config)), "grouped")


def test_folder_of_mistral_is_the_same_model(tmp_path: Path) -> None:
    folder, model = write_mistral(tmp_path / "codestral")
    loaded = load_checkpoint(folder)
    assert loaded.config == CODESTRAL
    assert (loaded.tokenizer.vocab_size, loaded.tokenizer.eos_token_ids) == (409, (2,))
    assert loaded.chat_template.special_tokens == {"bos_token": "<s>"}
    tokens = torch.arange(2, 60)[None]
    torch.testing.assert_close(
        loaded.model.parallel(tokens), model(tokens).logits, rtol=TOLERANCE, atol=TOLERANCE
    )
    before = loaded.digest
    params = json.loads((folder / "params.json").read_text(encoding="utf-8"))
    (folder / "params.json").write_text(json.dumps(params, indent=1), encoding="utf-8")
    assert load_checkpoint(folder).digest != before


def test_config_of_transformers_comes_before_that_of_mistral(tmp_path: Path) -> None:
    folder = write_theirs(tmp_path / "both", "head")
    (folder / "params.json").write_text("{}", encoding="utf-8")
    same(load_checkpoint(folder), "head")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "transformer"}, "params.json: of Mistral's own layout only model_type"),
        ({"model_type": None}, "params.json: of Mistral's own layout only model_type 'mamba'"),
        ({"rms_norm": False}, "rms_norm False is not supported"),
        ({"dim": 0}, "dim must be a positive integer"),
        ({"dim": 63}, "params.json: headdim must divide 126, not 64"),
        ({"n_groups": 1}, "is .*, wanted"),
        ({"surprise": 1}, "unknown field 'surprise'"),
    ],
)
def test_params_that_are_not_computed_are_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder, _ = write_mistral(tmp_path / "codestral", **change)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize("limit", [[0.0, math.inf], [0, "Infinity"], None, ...])
def test_unbounded_step_is_written_in_several_ways(tmp_path: Path, limit: Any) -> None:
    same(load_checkpoint(write_theirs(tmp_path, "head", time_step_limit=limit)), "head")


def test_fields_of_older_conversions_are_harmless(tmp_path: Path) -> None:
    older = {"ssm_cfg": {}, "d_model": 64, "n_layer": 2, "rms_norm": True, "fused_add_norm": True}
    same(load_checkpoint(write_theirs(tmp_path, "first", **older, time_step_rank="auto")), "first")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("head", {"use_bias": True}, "mamba2: use_bias True is not supported, only False"),
        ("head", {"use_conv_bias": False}, "mamba2: use_conv_bias False is not supported"),
        ("head", {"hidden_act": "gelu"}, "mamba2: hidden_act 'gelu' is not supported"),
        ("head", {"norm_before_gate": True}, "mamba2: norm_before_gate True is not supported"),
        ("head", {"rms_norm": False}, "mamba2: rms_norm False is not supported"),
        ("head", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit \[0.0, 0.1\] is not supported"),
        ("head", {"time_step_limit": [0.1, math.inf]}, "time_step_limit .* only 0 to infinity"),
        ("head", {"time_step_limit": 3}, "time_step_limit 3 is not supported"),
        (
            "head",
            {"num_heads": 3},
            r"num_heads \* head_dim is 192, not expand \* hidden_size = 128",
        ),
        ("head", {"n_groups": 3}, "num_groups must divide 2 heads, not 3"),
        ("head", {"n_groups": 2}, "is .*, wanted"),
        ("head", {"num_hidden_layers": 3}, "lacks key 'backbone.layers.2"),
        ("head", {"num_hidden_layers": 1}, "unknown key 'backbone.layers.1"),
        ("head", {"surprise": 1}, "mamba2: unknown field 'surprise'"),
        ("head", {"tie_word_embeddings": False}, "lacks key 'lm_head.weight'"),
        ("first", {"use_bias": True}, "mamba: use_bias True is not supported, only False"),
        ("first", {"ssm_cfg": {"d_state": 3}}, "mamba: ssm_cfg is not supported next to"),
        ("first", {"time_step_rank": "much"}, "time_step_rank must be a positive integer"),
        ("first", {"time_step_rank": 3}, "is .*, wanted"),
        ("first", {"mixer_rms_eps": 1e-6}, "mamba: unknown field 'mixer_rms_eps'"),
        ("falcon", {"mixer_rms_eps": 2.0}, r"mixer_norm_eps must be in \(0, 1\)"),
        ("falcon", {"intermediate_size": 64}, "is .*, wanted"),
    ],
)
def test_what_transformers_may_say_and_we_do_not_do_is_named(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_checkpoint(write_theirs(tmp_path, name, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer": "Mamba3"},
            "ssm_cfg: layer 'Mamba3' is not supported, only 'Mamba1' or 'Mamba2'",
        ),
        ({"rmsnorm": False}, "ssm_cfg: rmsnorm False is not supported"),
        ({"norm_before_gate": True}, "ssm_cfg: norm_before_gate True is not supported"),
        ({"D_has_hdim": True}, "ssm_cfg: D_has_hdim True is not supported"),
        ({"d_ssm": 64}, "ssm_cfg: d_ssm 64 is not supported"),
        ({"bias": True}, "ssm_cfg: bias True is not supported"),
        ({"conv_bias": False}, "ssm_cfg: conv_bias False is not supported"),
        ({"dt_limit": [0.0, 0.5]}, r"ssm_cfg: dt_limit \[0.0, 0.5\] is not supported"),
        ({"headdim": 60}, "ssm_cfg: headdim must divide 128, not 60"),
        ({"surprise": 1}, "ssm_cfg: unknown field 'surprise'"),
    ],
)
def test_what_state_spaces_may_say_of_a_mixer_and_we_do_not_do_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write_own(tmp_path, "head", own_config("head", **change))
    tiny_tokenizer().save(folder / "tokenizer.json")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_intermediate": 256}, "mamba_ssm: d_intermediate 256 is not supported"),
        ({"attn_layer_idx": [9]}, "attn_layer_idx is not supported: some of its layers are att"),
        ({"attn_cfg": {"num_heads": 4}}, "attn_cfg is not supported"),
        ({"rms_norm": False}, "mamba_ssm: rms_norm False is not supported"),
        ({"ssm_cfg": 3}, "ssm_cfg must be an object, not 3"),
        ({"surprise": 1}, "mamba_ssm: unknown field 'surprise'"),
        ({"vocab_size": 290}, r"embedding.weight is \[310, 64\], wanted \[290, 64\]"),
    ],
)
def test_what_state_spaces_may_say_and_we_do_not_do_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write_own(tmp_path, "head", own_config("head") | change)
    tiny_tokenizer().save(folder / "tokenizer.json")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_checkpoint(folder)


def test_head_that_is_not_the_embedding_is_refused_where_they_are_tied(tmp_path: Path) -> None:
    def other(weights: Published) -> Published:
        return weights | {"lm_head.weight": weights["lm_head.weight"] + 1}

    folder = write_own(tmp_path, "head", own_config("head"), other)
    tiny_tokenizer().save(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not the embedding, though"):
        load_checkpoint(folder)
