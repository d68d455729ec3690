from __future__ import annotations

import json
from pathlib import Path

import pytest

from model.chat import PLAIN, ChatTemplate, read_chat_template
from model.checkpoint import load_checkpoint
from model.config import ConfigError
from model.tokenizer import END_OF_TEXT
from tests.tiny import write_model


def write(folder: Path, **settings: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def test_folder_without_one_has_none(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    write(tmp_path, eos_token="<|endoftext|>")
    assert read_chat_template(tmp_path) is None


def test_template_and_special_tokens_come_from_the_tokenizers_settings(tmp_path: Path) -> None:
    write(
        tmp_path, chat_template="{{ x }}", bos_token={"content": "<s>"}, eos_token="</s>", pad=None
    )
    found = ChatTemplate("{{ x }}", None, {"bos_token": "<s>", "eos_token": "</s>"})
    assert read_chat_template(tmp_path) == found
    assert found.of(with_tools=True) == found.of(with_tools=False) == "{{ x }}"


def test_one_of_the_named_ones_is_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    write(tmp_path, chat_template=named)
    found = read_chat_template(tmp_path)
    assert found is not None
    assert (found.of(with_tools=False), found.of(with_tools=True)) == ("D", "T")


def test_file_of_its_own_comes_first(tmp_path: Path) -> None:
    write(tmp_path, chat_template="settings", eos_token="</s>")
    (tmp_path / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert read_chat_template(tmp_path) == ChatTemplate("file é", None, {"eos_token": "</s>"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": 3}, "must be a text or a list"),
        ({"chat_template": [{"name": "default"}]}, "must be a text or a list"),
        ({"chat_template": [{"name": "rag", "template": ""}]}, "named 'default'"),
        ({"chat_template": "x" * (2**20 + 1)}, "more than 1048576"),
        ({"chat_template": "", "eos_token": 3}, "eos_token must be a text"),
    ],
)
def test_what_is_no_template_is_refused(tmp_path: Path, settings: object, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_chat_template(tmp_path)


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_chat_template(tmp_path)


def test_checkpoint_has_its_template_or_the_plain_one(tmp_path: Path) -> None:
    write_model(tmp_path)
    plain = load_checkpoint(tmp_path)
    assert plain.chat_template == ChatTemplate(PLAIN, None, {"bos_token": END_OF_TEXT})
    write(tmp_path, chat_template="own")
    assert load_checkpoint(tmp_path).chat_template == ChatTemplate("own")
    assert load_checkpoint(tmp_path).digest == plain.digest
