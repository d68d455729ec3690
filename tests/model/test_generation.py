"""What ``generation_config.json`` says of sampling holds where a request says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import read_sampling
from model.files import ConfigError


def folder_with(path: Path, values: dict[str, Any]) -> Path:
    (path / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"temperature": 0.2, "top_p": 0.9, "do_sample": True}, {"temperature": 0.2, "top_p": 0.9}),
        ({"top_k": 20, "temperature": 1}, {"top_k": 20, "temperature": 1.0}),
        ({"top_n_sigma": 2, "min_p": 0.1}, {"top_n_sigma": 2.0, "min_p": 0.1}),
        ({"temperature": 0.6, "do_sample": False}, {}),
        ({"eos_token_id": [1, 2], "repetition_penalty": None, "max_length": 20}, {}),
    ],
)
def test_fields_of_sampling_are_read(
    tmp_path: Path, values: dict[str, Any], found: dict[str, float]
) -> None:
    assert read_sampling(folder_with(tmp_path, values)) == found


def test_folder_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", -1), ("top_p", 1.5), ("top_k", 2.5), ("min_p", "0.1"), ("top_p", True)),
        *(("top_n_sigma", -1.0), ("top_n_sigma", 101)),
    ],
)
def test_value_out_of_range_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {field} must be in"):
        read_sampling(folder_with(tmp_path, {field: value}))
