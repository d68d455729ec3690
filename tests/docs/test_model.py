"""model.md has every field, option and column, and its bytes and commands are right."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest

from model.config import ModelConfig
from model.state import StateLayout, kv_cache_bytes_per_token
from model.training.loop import _INDIFFERENT
from model.training.report import COLUMNS
from tests.docs.pages import flags, flowed, names, page, rows, section

TEXT = page("model.md")
COMMANDS = [
    shlex.split(line.replace("\\\n", ""))
    for block in re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    for line in re.findall(r"^everstream (?:.*\\\n)*.*$", block, re.MULTILINE)
]


def test_table_has_every_field_and_default() -> None:
    table = {name: row[1] for row in rows(section(TEXT, "ModelConfig")) for name in names(row[0])}
    fields = {field.name: field for field in dataclasses.fields(ModelConfig)}
    del fields["state_dtype"]  # which no file has
    assert table.keys() == fields.keys()
    for name in ("hidden_size", "num_hidden_layers", "head_dim", "intermediate_size"):
        assert table[name] == str(fields[name].default)


@pytest.mark.parametrize("attention", ["gated", "delta"])
def test_figures_of_the_example_are_right(attention: str) -> None:
    config = ModelConfig(vocab_size=4096, attention=attention)
    state, cache = StateLayout.of(config).num_bytes, kv_cache_bytes_per_token(config)
    assert f"= {state:,} bytes\n" in TEXT
    ratio = f"= {cache:,} bytes for each token, and so is past that after {state // cache} "
    assert ratio in flowed(TEXT)


def test_table_has_every_column_of_the_log() -> None:
    table = {names(row[0])[0]: names(row[1]) for row in rows(section(TEXT, "Train your own"))}
    assert table["log.csv"] == list(COLUMNS)


def test_every_option_that_may_change_is_named() -> None:
    (sentence,) = re.findall(r"the folder, (.*?) may change", TEXT, re.DOTALL)
    options = {f"--{name.replace('_', '-')}" for name in _INDIFFERENT - {"out"}}
    assert set(names(sentence)) == options


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[1])
def test_commands_take_what_the_page_gives_them(words: list[str]) -> None:
    assert {word for word in words if word.startswith("--")} <= flags(words[1])


def test_every_training_command_has_an_example() -> None:
    assert {words[1] for words in COMMANDS} >= {"tokenizer", "train", "eval", "export", "serve"}
