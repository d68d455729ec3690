from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.config import ConfigError, ModelConfig


def test_json_round_trip(tmp_path: Path) -> None:
    config = ModelConfig(vocab_size=300, attention_options={"conv_size": 0}, hidden_size=32)
    config.save(tmp_path / "config.json")
    assert ModelConfig.load(tmp_path / "config.json") == config
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["model_type"] == "everstream"
    assert values["num_hidden_layers"] == 6


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
