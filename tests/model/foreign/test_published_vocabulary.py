"""A published .pth comes without its vocabulary, which all of them share: it is bundled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from model.checkpoint import CheckpointError, load_checkpoint, load_tokenizer
from model.tokenization.world import FILE, PADDED_SIZE, PUBLISHED
from tests.model.attention.packages import folder
from tests.rwkv7 import SHAPES, published, write_pth
from tests.tiny import tiny_tokenizer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    shape = replace(SHAPES["odd"], vocab_size=PADDED_SIZE)
    return write_pth(tmp_path / "published.pth", published(shape))


def test_bundled_vocabulary_is_the_published_one() -> None:
    assert PUBLISHED.read_bytes() == (folder("rwkv") / FILE).read_bytes().replace(b"\r\n", b"\n")


@pytest.mark.slow
def test_file_alone_is_loaded_with_it(file: Path) -> None:
    checkpoint = load_checkpoint(file)
    assert checkpoint.tokenizer.encode("User: hi\n\n") == [24281, 59, 4571, 261]
    assert load_tokenizer(file).content == checkpoint.tokenizer.content
    elsewhere = load_checkpoint(file, tokenizer=PUBLISHED)
    assert elsewhere.digest == checkpoint.digest


def test_tokenizer_next_to_the_file_goes_first(file: Path) -> None:
    tiny_tokenizer().save(file.with_name("tokenizer.json"))
    assert load_checkpoint(file).tokenizer.vocab_size == tiny_tokenizer().vocab_size


def test_model_of_another_size_still_needs_its_own(tmp_path: Path) -> None:
    path = write_pth(tmp_path / "small.pth", published(SHAPES["odd"]))
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json or rwkv_vocab"):
        load_checkpoint(path)
