"""A folder without a config is the one model file in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.checkpoint import load_checkpoint, locate
from model.weights import CheckpointError
from tests.gguf_files import gguf_tensors, world_vocabulary, write_gguf
from tests.rwkv7 import SHAPES, published

SHAPE = SHAPES["square"]
FILL = world_vocabulary({id + 1: bytes([id]) for id in range(256)}, SHAPE.vocab_size)


@pytest.mark.parametrize("split", [0, 30], ids=["one part", "several"])
def test_folder_with_only_a_gguf_loads(tmp_path: Path, split: int) -> None:
    tensors = gguf_tensors(published(SHAPE))
    write_gguf(tmp_path / "model.gguf", SHAPE, tensors, "F32", FILL, split=split)
    (tmp_path / "README.md").write_text("What it is.")
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"what sees images")
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config == SHAPE.config
    assert checkpoint.digest == load_checkpoint(locate(tmp_path)).digest


def test_one_of_several_files_has_to_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"has 2 models, name one: a\.gguf, b\.gguf"):
        load_checkpoint(tmp_path)


def test_folder_without_a_model_lacks_a_config(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("What it is.")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_checkpoint(tmp_path)
