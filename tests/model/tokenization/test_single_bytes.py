"""A vocabulary of bytes: an id is its byte, and id 0 ends a text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from model.checkpoint import load_checkpoint
from model.tokenization.world import BytesCodec
from model.tokenizer import Tokenizer, TokenizerError
from tests.rwkv7 import SHAPES, published, write_pth

FILE = "rwkv_vocab_v20230424.txt"
TEXT = "a é\n\U0001f600 <|endoftext|>"
LINES = [f"{id} {bytes([id])!r} 1\n" for id in range(256)]


@pytest.mark.parametrize("first", [0, 1], ids=["256 lines", "255 lines"])
def test_file_whose_ids_are_bytes_loads(tmp_path: Path, first: int) -> None:
    path = tmp_path / FILE
    path.write_text("".join(LINES[first:]))
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.eos_token_ids) == ("bytes", 256, (0,))
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(TEXT.encode()) == TEXT
    assert tokenizer.encode("x<|endoftext|>", allow_special=True) == [ord("x"), 0]
    tokenizer.save(tmp_path / "again.txt")
    assert Tokenizer.load(tmp_path / "again.txt").digest == tokenizer.digest


def test_byte_that_ends_a_text_is_in_none() -> None:
    tokenizer = Tokenizer(BytesCodec()).remembering()
    assert tokenizer.encode("a\0b") == tokenizer.encode_continuation("a b") == [97, 32, 98]
    assert tokenizer.decode([97, 0]) == "a"


def test_id_0_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text("".join([*LINES, "256 'ab' 2\n"]))
    with pytest.raises(TokenizerError, match=r"id 0 of b'\\x00' is 0"):
        Tokenizer.load(path)


def test_native_file_of_256_ids_has_bytes_by_default(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPES["square"], vocab_size=256)
    path = write_pth(tmp_path / "model.pth", published(shape))
    assert load_checkpoint(path).tokenizer.kind == "bytes"
    (tmp_path / FILE).write_text("".join(f"{id + 1} {bytes([id])!r} 1\n" for id in range(255)))
    with pytest.raises(TokenizerError, match="there is no token for byte 0xFF"):
        load_checkpoint(path)  # a file in the folder counts
