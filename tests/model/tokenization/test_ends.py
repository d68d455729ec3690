"""The tokens that end a text are those that the checkpoint's files name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import save_tokenizer
from model.config import ConfigError
from model.tokenizer import TokenizerError
from tests.model.tokenization.files import llama, load_folder, neox

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"


def write(folder: Path, text: str, **files: Any) -> Path:
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config": {"eos_token_id": 2}}, (2,)),
        ({"config": {"eos_token_id": [2, 0]}}, (2, 0)),
        ({"generation_config": {"eos_token_id": 2}}, (2,)),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (2,)),
        ({"tokenizer_config": {"eos_token": {"content": "</s>", "lstrip": False}}}, (2,)),
        ({"config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": "</s>"}}, (1, 2)),
        ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [0, 1]}}, (1, 0)),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "<s>"}}, (1,)),
        # A multimodal model's text model.
        ({"config": {"text_config": {"eos_token_id": 2}}}, (2,)),
        ({"config": {"eos_token_id": 1, "text_config": {"eos_token_id": 2}}}, (1,)),
        # A token of the vocabulary that is ordinary text ends one too, and is never the main end.
        ({"config": {"eos_token_id": [13, 2]}}, (2, 13)),
    ],
)
def test_files_name_the_ends(tmp_path: Path, files: dict[str, Any], ids: tuple[int, ...]) -> None:
    tokenizer = load_folder(write(tmp_path, llama(), **files))
    assert tokenizer.eos_token_ids == ids
    assert tokenizer.eos_token_id == ids[0]
    assert not tokenizer.token_bytes(ids[0])


def test_ordinary_text_that_ends_a_text_keeps_its_bytes(tmp_path: Path) -> None:
    newline = 3 + 0x0A
    tokenizer = load_folder(write(tmp_path, llama(), config={"eos_token_id": [2, newline]}))
    assert tokenizer.token_bytes(newline) == b"\n"
    assert tokenizer.token_bytes(newline)


def test_default_name_is_used_if_no_file_names_another(tmp_path: Path) -> None:
    assert load_folder(write(tmp_path, neox())).eos_token_ids == (0,)
    write(tmp_path, neox(), config={"eos_token_id": 1})
    assert load_folder(tmp_path).eos_token_ids == (1,)


def test_missing_end_is_refused_with_the_files_searched(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"generation_config\.json.*tokenizer_config\.json"):
        load_folder(write(tmp_path, llama()))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"eos_token_id": 10**6}}, r"config\.json: eos_token_id must be in 0\.\."),
        ({"generation_config": {"eos_token_id": "2"}}, r"generation_config\.json: eos_token_id"),
        ({"tokenizer_config": {"eos_token": "<eos>"}}, "eos_token '<eos>' is not in"),
        ({"tokenizer_config": {"eos_token": 2}}, "eos_token 2 is not in"),
    ],
)
def test_ends_that_are_none_are_refused(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_folder(write(tmp_path, llama(), **files))


def test_saved_tokenizer_keeps_all_ends(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    tokenizer = load_folder(write(tmp_path / "from", llama(), config={"eos_token_id": [2, 0]}))
    save_tokenizer(tmp_path / "to", tokenizer)
    assert load_folder(tmp_path / "to").eos_token_ids == (2, 0)
