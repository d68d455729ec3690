"""Which tokenizer.json files load: the kinds of GPT-2 and Llama; others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

from model.tokenizer import Tokenizer, TokenizerError
from tests.model.tokenization.files import llama
from tests.tiny import TEXT


def test_gpt2_tokenizer_gives_the_ids_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "ours.json")
    learnt = json.loads((tmp_path / "ours.json").read_text())["model"]
    merges = [tuple(pair) for pair in learnt["merges"]]
    theirs = GPT2TokenizerFast(vocab=learnt["vocab"], merges=merges)
    theirs.save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    text = TEXT + " naïve\n\n  café — 3.14 don't"
    assert loaded.encode(text) == theirs(text)["input_ids"]
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == theirs.eos_token_id


def test_llama_tokenizer_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(llama("first"), encoding="utf-8")
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    theirs.save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    text = TEXT + " naïve\n\n  café — 3.14 漢字 🦊"
    assert loaded.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert loaded.decode(loaded.encode(text)) == theirs.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == theirs.eos_token_id == 2


def test_refusal_names_the_file_and_the_reason(tmp_path: Path) -> None:
    Backend(models.WordPiece({"[UNK]": 0, "a": 1})).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: model WordPiece is not supported"):
        Tokenizer.load(tmp_path / "tokenizer.json")
