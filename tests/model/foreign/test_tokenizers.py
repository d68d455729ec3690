"""Which tokenizer.json files load: GPT-2's kind does, the others are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import GPT2TokenizerFast

from model.tokenizer import Tokenizer, TokenizerError
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


def sentence_piece(special: str) -> Backend:
    vocab = {"<unk>": 0, "<0x0A>": 1, "▁": 2, "a": 3, "▁a": 4}
    backend = Backend(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.ByteFallback()
    backend.add_special_tokens([special])
    return backend


@pytest.mark.parametrize(
    ("special", "message"),
    [("</s>", r"no '<\|endoftext\|>' token"), ("<|endoftext|>", "is not byte-level")],
)
def test_sentence_piece_is_refused(tmp_path: Path, special: str, message: str) -> None:
    sentence_piece(special).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(tmp_path / "tokenizer.json")
