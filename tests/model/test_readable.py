"""Who may read a checkpoint that was written, and what is said to those who may not."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from model.bundled_models import bundled_models
from model.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from model.quantization.quantize import save_quantized
from model.training.loop import save_progress
from tests.tiny import tiny_checkpoint

NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """A checkpoint where everybody may go, which pytest's own folders are not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    checkpoint = tiny_checkpoint()
    with umask(0o022):
        save_checkpoint(path / "model", checkpoint.model, checkpoint.tokenizer)
    yield path / "model"
    path.chmod(0o755)
    shutil.rmtree(path)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_a_model_have_the_mode_of_the_umask(
    folder: Path, mask: int, mode: int, tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(folder)
    optimizer = torch.optim.SGD(checkpoint.model.parameters())
    with umask(mask):
        save_checkpoint(tmp_path / "saved", checkpoint.model, checkpoint.tokenizer)
        save_quantized(tmp_path / "quantized", checkpoint, "int8")
        save_progress(tmp_path / "progress", checkpoint.model, [optimizer], [], {})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "tensors.safetensors"}
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {
        path.name: oct(mode) for path in files
    }


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_file_that_may_not_be_read_is_not_called_missing(folder: Path, name: str) -> None:
    (folder / name).chmod(0)
    with unprivileged(), pytest.raises(CheckpointError, match=f"{name}: Permission denied"):
        load_checkpoint(folder)


def test_folder_that_may_not_be_entered_is_not_called_missing(folder: Path) -> None:
    folder.chmod(0)
    with unprivileged(), pytest.raises(CheckpointError, match="Permission denied"):
        load_checkpoint(folder)


def test_folder_below_one_that_may_not_be_entered_is_not_called_missing(folder: Path) -> None:
    folder.parent.chmod(0)
    with unprivileged(), pytest.raises(CheckpointError, match="Permission denied"):
        load_checkpoint(folder)


@pytest.mark.parametrize("source", ["gpt2", "./runs/none", "/none/at/all", "runs/mine/model"])
def test_what_a_model_can_be_is_said(source: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(source)
    message = str(caught.value)
    assert message.startswith(f"{source}: there is no such folder")
    assert "a folder with config.json, a .pth, .st or .gguf file, " in message
    assert all(name in message for name in bundled_models())
    assert message.endswith(", or owner/name on the Hugging Face hub")


def test_a_file_of_a_model_is_not_its_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        load_checkpoint(folder / "config.json")
