"""The comparison of published files, on a file made here whose logits are known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.published_files import FILES, RESULT, compared, found_below, is_equal, next_to
from benchmarks.report import read_result
from benchmarks.studies.pages.models import published_file_table
from model.checkpoint import load_checkpoint
from tests.rwkv7 import SHAPES, published
from tests.rwkv_cpp import rwkv_cpp_tensors, write_rwkv_cpp

SHAPE = dataclasses.replace(SHAPES["square"], vocab_size=256)
FILE = dataclasses.replace(FILES[0], expected=next_to("logits.bin"), tolerance=1e-4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "clone" / "tests"
    folder.mkdir(parents=True)
    path = write_rwkv_cpp(folder / FILE.name, SHAPE, rwkv_cpp_tensors(published(SHAPE)))
    with torch.no_grad():
        logits = load_checkpoint(path).model.parallel(torch.tensor([list(FILE.prompt.encode())]))
    logits[0, -1].numpy().tofile(folder / "logits.bin")
    return path


def test_file_is_found_below_a_folder_and_equal(path: Path, tmp_path: Path) -> None:
    assert found_below([tmp_path]) == {FILE.name: path}
    found = compared(FILE, path)
    assert set(found["largest_difference"]) == {"native", "torch"}
    assert is_equal(found)


@pytest.mark.parametrize("wrong", [1e-3, np.nan])
def test_another_number_is_not_equal(path: Path, wrong: float) -> None:
    logits = np.fromfile(path.with_name("logits.bin"), "<f4")
    logits[7] += wrong
    logits.tofile(path.with_name("logits.bin"))
    assert not is_equal(compared(FILE, path))


def test_committed_result_has_every_file_and_is_equal() -> None:
    files = read_result(RESULT)["files"]
    assert [each["name"] for each in files] == [file.name for file in FILES]
    assert all(map(is_equal, files))
    assert FILES[0].name in published_file_table()
