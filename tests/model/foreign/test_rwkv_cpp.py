"""Files of rwkv.cpp are the model of the same weights in a native file, or are refused."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.checkpoint import load_checkpoint
from model.weights import CheckpointError
from model.weights.rwkv_cpp import RwkvCppFile
from tests.rwkv7 import SHAPES, Published, published, write_pth
from tests.rwkv_cpp import rwkv_cpp_tensors, write_rwkv_cpp

SHAPE = dataclasses.replace(SHAPES["square"], vocab_size=256)
WEIGHTS = published(SHAPE)


def logits(path: Path) -> torch.Tensor:
    return load_checkpoint(path).model.parallel(torch.arange(2, 40)[None])


def test_file_is_the_model(tmp_path: Path) -> None:
    path = write_rwkv_cpp(tmp_path / "model.bin", SHAPE, rwkv_cpp_tensors(WEIGHTS))
    checkpoint = load_checkpoint(path)
    assert checkpoint.config == SHAPE.config
    native = write_pth(tmp_path / "model.pth", WEIGHTS)
    assert torch.equal(logits(path), logits(native))


def test_matrices_of_16_bits_are_read(tmp_path: Path) -> None:
    tensors = rwkv_cpp_tensors(WEIGHTS)
    path = write_rwkv_cpp(tmp_path / "model.bin", SHAPE, tensors, is_half=True)
    file = RwkvCppFile(path)
    assert file.stored_dtype == "float16"
    halved: Published = {
        key: tensor.half().float() if key.endswith(".weight") and tensor.ndim == 2 else tensor
        for key, tensor in WEIGHTS.items()
    }
    native = write_pth(tmp_path / "model.pth", halved)
    assert torch.equal(logits(path), logits(native))


def number(at: int, value: int) -> Callable[[bytes], bytes]:
    """Puts a number of 32 bits at a place."""
    return lambda data: data[:at] + struct.pack("<I", value) + data[at + 4 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (number(4, 100), "is not a file of rwkv.cpp of version 101"),
        (number(8, 257), r"its sizes are \[257, .*\], the tensors have \[256, "),
        (number(16, 1 << 31), r"its sizes are .*, the tensors have"),
        (number(24, 5), "a tensor has 5 axes"),
        (number(28, 9999), "a tensor has 2 axes"),
        (number(32, 2), "'emb.weight' is a quantised tensor"),
        (number(36, 1 << 31), "'emb.weight' is not whole"),
        (lambda data: data[:-1], "'head.weight' is not whole"),
        (lambda data: data + data[24:], "'emb.weight' is not whole, or is there twice"),
        (lambda data: data[:20], "the file is damaged"),
        (lambda data: data + b"\1\0", "the file is damaged"),
    ],
)
def test_damaged_file_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = write_rwkv_cpp(tmp_path / "model.bin", SHAPE, rwkv_cpp_tensors(WEIGHTS))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=f"model.bin.*{message}"):
        load_checkpoint(path)


def test_other_file_of_the_name_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"PK\3\4" + bytes(99))
    with pytest.raises(
        CheckpointError, match=r"not a folder; a model is a folder with config\.json"
    ):
        load_checkpoint(path)
