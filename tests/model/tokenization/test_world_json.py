"""RWKV's vocabulary in a `tokenizer.json` has the ids that its publisher's library gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from model.tokenization.base import TokenizerError
from model.tokenizer import Tokenizer
from tests.world_vocabulary import END, TOKENS, rwkv_trie, word_piece, write_txt

VOCAB_SIZE = 301
WORD_PIECE = word_piece(VOCAB_SIZE)
THEIRS = Backend.from_str(json.dumps(WORD_PIECE))


def load(folder: Path, values: dict[str, Any]) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    return Tokenizer.load(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("word_piece"), WORD_PIECE)


@given(st.lists(st.sampled_from([t.decode(errors="ignore") for t in TOKENS.values()])).map("".join))
def test_ids_are_those_of_the_word_piece(ours: Tokenizer, text: str) -> None:
    wanted = THEIRS.encode(text, add_special_tokens=False).ids if text else []
    assert ours.encode(text) == wanted
    assert ours.decode(ours.encode(text)) == text


def test_three_forms_are_one_tokenizer(ours: Tokenizer, tmp_path: Path) -> None:
    """So they have one digest."""
    write_txt(tmp_path)
    forms = [ours, load(tmp_path, rwkv_trie()), Tokenizer.load(next(tmp_path.glob("*.txt")))]
    assert len({form.digest for form in forms}) == 1
    assert {form.vocab_size for form in forms} == {max(TOKENS) + 1}


def test_name_of_the_end_is_text_until_it_is_allowed(ours: Tokenizer) -> None:
    """The publisher's library finds it in any text."""
    assert THEIRS.encode(f"a{END}", add_special_tokens=False).ids == [98, 0]
    assert ours.decode(ours.encode(f"a{END}")) == f"a{END}"
    assert ours.encode(f"a{END}", allow_special=True) == [98, 0]


def test_names_of_unused_ids_are_text(ours: Tokenizer) -> None:
    """The library gives the id of an embedding that was never trained."""
    text = "\ue000300\ue001"
    assert ours.decode(ours.encode(text)) == text
    assert max(ours.encode(text)) < 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["model"].update(continuing_subword_prefix="##"), "WordPiece is not supported"),
        (lambda v: v["pre_tokenizer"].update(use_regex=True), "WordPiece is not supported"),
        (lambda v: v["model"]["vocab"].update({"a b": 290}), "'a b' is not byte-level"),
        (lambda v: v["model"]["vocab"].update({"ab": "7"}), "an id that is not an integer"),
        (lambda v: v["model"]["vocab"].update({"ab": 1 << 40}), "an id is not in 0"),
        (lambda v: v.update(added_tokens=[7]), "added_tokens is not a list of objects"),
        (lambda v: v["model"]["vocab"].pop("a"), "no token for byte 0x61"),
        (
            lambda v: v["added_tokens"].append({"id": 301, "content": "<tool>", "special": True}),
            "added token '<tool>' is not supported",
        ),
    ],
)
def test_other_word_pieces_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    values = json.loads(json.dumps(WORD_PIECE))
    change(values)
    with pytest.raises(TokenizerError, match=message):
        load(tmp_path, values)
