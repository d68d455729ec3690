from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from model.tokenizer import END_OF_TEXT, Tokenizer, TokenizerError, train_tokenizer
from tests.tiny import TEXT, tiny_tokenizer


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(max_size=40))
def test_a_special_name_in_text_is_plain_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text + END_OF_TEXT + text)
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == text + END_OF_TEXT + text


def test_special_names_count_where_they_are_allowed() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(f"a{END_OF_TEXT}b", allow_special=True)
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids) == "ab"


def test_learnt_words_take_fewer_tokens() -> None:
    assert len(tiny_tokenizer().encode(TEXT)) < len(TEXT.encode()) * 0.8


def test_tokens_join_to_the_bytes_of_the_text() -> None:
    tokenizer = tiny_tokenizer()
    text = "The fox — a red one — sang “la la” 🦊"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(tokenizer.eos_token_id) == b""


def test_file_round_trip(tmp_path: Path) -> None:
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode(TEXT) == tiny_tokenizer().encode(TEXT)
    assert loaded.digest == tiny_tokenizer().digest


def test_vocabulary_too_small_for_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="257"):
        train_tokenizer([], 256)


def test_files_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError):
        Tokenizer.load(tmp_path / "tokenizer.json")
    Backend(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="endoftext"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def chat_tokenizer() -> Tokenizer:
    backend = Backend.from_str(tiny_tokenizer().content)
    names = ["<|im_start|>", "<|im_start|>s", AddedToken("<|end|>", lstrip=True, rstrip=True)]
    backend.add_special_tokens(names)
    return Tokenizer.from_json(backend.to_str())


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<|im_start|>", "<|end|>", END_OF_TEXT, " ", "s", "<"])))
def test_every_special_name_is_plain_text_unless_allowed(words: list[str]) -> None:
    tokenizer, text = chat_tokenizer(), "".join(words)
    ids = tokenizer.encode(text)
    assert all(map(tokenizer.token_bytes, ids))
    assert tokenizer.decode(ids) == text


def test_pieces_are_the_longest_names_and_what_is_between() -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer.special_ids
    assert set(ids) == {END_OF_TEXT, "<|im_start|>", "<|im_start|>s", "<|end|>"}
    text = f"a <|im_start|>s<|im_start|> b \n<|end|> \nc{END_OF_TEXT}"
    assert list(tokenizer.pieces(text)) == [
        *("a ", ids["<|im_start|>s"], ids["<|im_start|>"], " b", ids["<|end|>"], "c"),
        tokenizer.eos_token_id,
    ]
    assert list(tokenizer.pieces("")) == []
