from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from model.bundled_models import DEFAULT_MODEL
from model.config import ConfigError, ModelConfig, read_json


def test_json_round_trip(tmp_path: Path) -> None:
    config = ModelConfig(vocab_size=300, attention_options={"conv_size": 0}, hidden_size=32)
    config.save(tmp_path / "config.json")
    assert ModelConfig.load(tmp_path / "config.json") == config
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["model_type"] == "everstream"
    assert values["num_hidden_layers"] == 6


def test_file_of_an_own_model_has_no_fields_of_other_families() -> None:
    """So that a file from before them keeps its bytes, and its model its digest."""
    bundled = DEFAULT_MODEL / "config.json"
    config = ModelConfig.load(bundled)
    assert config.to_dict() == json.loads(bundled.read_text())
    other = dataclasses.replace(config, attention_bias=True, norm="layer", mlp="gelu")
    assert ModelConfig.from_dict(other.to_dict()) == other
    assert other.to_dict().keys() - config.to_dict().keys() == {"attention_bias", "norm", "mlp"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", -1),
        ("num_hidden_layers", 2.0),
        ("num_attention_heads", True),
        ("head_dim", "64"),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", 1),
        ("eos_token_id", 300),
        ("bos_token_id", -1),
        ("attention", "fourier"),
        ("attention", ["gated"]),
        ("attention", {}),
        ("attention", None),
        ("attention_bias", 1),
        ("norm", "batch"),
        ("mlp", "relu"),
        ("mlp", None),
        ("max_position_embeddings", -1),
        ("max_position_embeddings", True),
        ("max_position_embeddings", 8.0),
        ("attention_options", []),
        ("attention_options", {"conv_width": 4}),
        ("attention_options", {"conv_size": "4"}),
        ("attention_options", {"conv_size": 1}),
        ("attention_options", {"decay_rank": 0}),
    ],
)
def test_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field.split("_options", maxsplit=1)[0]):
        ModelConfig.from_dict({"model_type": "everstream", "vocab_size": 300, field: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama", "vocab_size": 300}, "model_type"),
        ({"vocab_size": 300}, "model_type"),
        ({"model_type": "everstream", "vocab_size": 300, "num_layers": 2}, "num_layers"),
        ({"model_type": "everstream"}, "vocab_size is missing"),
    ],
)
def test_foreign_file_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(values)


@pytest.mark.parametrize("text", ["{", "[1]", '"a"'])
def test_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        ModelConfig.load(tmp_path / "config.json")


def test_softmax_needs_an_even_head() -> None:
    with pytest.raises(ConfigError, match="head_dim"):
        ModelConfig(vocab_size=300, attention="softmax", head_dim=7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary": "after"}, "rotary"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
    ],
)
def test_bad_option_of_softmax_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_options.{message}"):
        ModelConfig(vocab_size=300, attention="softmax", attention_options=options)


def test_softmax_without_rotary_takes_an_odd_head() -> None:
    options: dict[str, object] = {"rotary": "none"}
    ModelConfig(vocab_size=300, attention="softmax", head_dim=7, attention_options=options)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, '{"a": ' + "9" * 5000 + "}"])
def test_json_that_python_cannot_hold_is_an_error_of_the_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="is not JSON"):
        read_json(tmp_path / "config.json")
