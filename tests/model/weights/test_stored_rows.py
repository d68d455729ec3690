"""Some rows of a tensor are those of the whole, in every format; a key is found without reading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import save_file

from model.families.rwkv7.read import read_native
from model.foreign.lora import Merged, RowChange
from model.foreign.weights import Part, Renamed
from model.weights import Array, StoredWeights
from model.weights.gguf_file import GgufFile
from model.weights.int4 import rounded
from model.weights.safetensors import WeightFiles
from model.weights.torch_file import TorchFile
from tests.gguf_blocks import numbers_of, random_blocks
from tests.gguf_files import finish
from tests.rwkv7 import SHAPES, published, write_pth

TENSORS = {"a": torch.linspace(-3, 3, 7 * 64).view(7, 64), "b": torch.arange(12.0)}


def bfloat16(folder: Path) -> StoredWeights:
    tensors = {key: tensor.bfloat16() for key, tensor in TENSORS.items()}
    save_file(tensors, folder / "a.safetensors")
    return WeightFiles([folder / "a.safetensors"])


def int8(folder: Path) -> StoredWeights:
    tensors = {"a": TENSORS["a"].mul(40).char(), "a.scale": torch.arange(7.0), "b": TENSORS["b"]}
    save_file(tensors, folder / "a.safetensors")
    return WeightFiles([folder / "a.safetensors"])


def int4(folder: Path) -> StoredWeights:
    found = rounded(TENSORS["a"].numpy())
    tensors = {
        "a": torch.from_numpy(found.packed()),
        "a.scale": torch.from_numpy(found.scales),
        "b": TENSORS["b"],
    }
    save_file(tensors, folder / "a.safetensors")
    return WeightFiles([folder / "a.safetensors"])


def torch_file(folder: Path) -> StoredWeights:
    tensors = {"a": TENSORS["a"].bfloat16(), "b": TENSORS["b"].double(), "t": TENSORS["a"].T}
    return TorchFile(write_pth(folder / "a.pth", tensors))


def gguf_file(folder: Path) -> StoredWeights:
    writer = gguf.GGUFWriter(folder / "a.gguf", "rwkv7")
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0):
        blocks = quantize(TENSORS["a"].numpy(), kind)
        writer.add_tensor(kind.name, blocks, raw_dtype=kind)
    writer.add_tensor("flat", quantize(TENSORS["a"][0].numpy(), kind), raw_dtype=kind)
    writer.add_tensor("a", TENSORS["a"].numpy().astype(np.float16))
    writer.add_tensor("b", TENSORS["b"].numpy())
    finish(writer)
    return GgufFile(folder / "a.gguf")


def renamed(folder: Path) -> StoredWeights:
    return read_native(TorchFile(write_pth(folder / "a.pth", published(SHAPES["odd"]))), "a")[1]


@pytest.mark.parametrize("write", [bfloat16, int8, int4, torch_file, gguf_file, renamed])
def test_rows_are_those_of_the_whole(
    write: Callable[[Path], StoredWeights], tmp_path: Path
) -> None:
    weights = write(tmp_path)
    for name, whole in weights.items():
        for begin, end in ((0, 2), (1, len(whole)), (3, 3), (0, None)):
            rows = weights.rows(name, begin, end)
            assert rows.dtype == np.float32
            assert rows.shape == whole[begin:end].shape
            assert rows.tobytes() == whole[begin:end].tobytes(), name
        weights.release()
        assert weights[name].tobytes() == whole.tobytes()


def test_blocks_are_given_where_they_are_those_of_the_file(tmp_path: Path) -> None:
    """Not of tensors that are changed on the way, or not in blocks."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "rwkv7")
    blocks = random_blocks("Q4_K", 7, 512)
    for name in ("same", "transposed", "changed"):
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.add_tensor("wide", np.ones((3, 4), np.float32))
    finish(writer)
    parts = {
        "a": Part(("same",)),
        "b": Part(("transposed",), "transposed"),
        "c": Part(("same", "changed")),
        "d": Part(("changed",)),
        "e": Part(("wide",)),
    }
    file = GgufFile(tmp_path / "a.gguf")
    change = RowChange(np.zeros(512, np.float32), 2)
    weights = Merged(Renamed(file, parts), {"d": [change]})
    kinds = {name: weights.block_kind(name) for name in parts}
    assert kinds == {"a": "Q4_K", "b": None, "c": None, "d": None, "e": None}
    for begin, end in ((0, 2), (3, 3), (1, None)):
        assert np.array_equal(weights.blocks("a", begin, end), blocks[begin:end])
    assert np.array_equal(numbers_of("Q4_K", blocks), weights["a"])


class Unread(TorchFile):
    def __getitem__(self, name: str) -> Array:
        raise AssertionError(name)


def test_keys_are_found_without_reading(tmp_path: Path) -> None:
    file = Unread(write_pth(tmp_path / "a.pth", published(SHAPES["odd"])))
    assert "head.weight" in file
    assert "other" not in file
    _, weights = read_native(file, "a")
    assert isinstance(weights, Renamed)
    assert "head.weight" in weights
    assert "other" not in weights
