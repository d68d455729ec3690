"""GGUF's Q4_0 of an int4 checkpoint has the matrices number by number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from model.checkpoint import load_checkpoint
from model.export import writer_of
from model.quantization.quantize import save_int4
from model.weights import StoredWeights
from model.weights.gguf_file import GgufFile
from model.weights.int4 import GROUP, rounded
from tests.tiny import TEXT, tiny_checkpoint


@pytest.mark.parametrize("family", ["rwkv7", "mamba2"])
def test_calibrated_matrices_keep_their_numbers(family: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "model.gguf"
    text.write_text(TEXT * 40, encoding="utf-8")
    save_int4(tmp_path / "int4", tiny_checkpoint(family), text)
    source = load_checkpoint(tmp_path / "int4")
    writer_of(source, "gguf")(out, source, "q4_0")
    found, stored = (
        load_checkpoint(out, tokenizer=tmp_path / "int4" / "tokenizer.json"),
        source.weights,
    )
    assert isinstance(stored, StoredWeights)
    assert isinstance(found.weights, StoredWeights)
    names = [name for name in stored if found.weights.dtype_of(name) == "Q4_0"]
    assert len(names) >= 4
    for name in names:
        assert stored.dtype_of(name) == "int4", name
        assert np.array_equal(found.weights[name], stored[name]), name
    assert GgufFile(out).dtype_of("token_embd.weight") == "Q8_0"


def test_blocks_are_those_of_gguf() -> None:
    found = rounded(np.random.default_rng(0).normal(size=(5, 3 * GROUP)).astype(np.float32))
    assert np.array_equal(dequantize(found.q4_0(), GGMLQuantizationType.Q4_0), found.numbers())


@pytest.mark.parametrize("dtype", ["q8_0", "bfloat16"])
def test_other_types_are_those_of_any_checkpoint(dtype: str, tmp_path: Path) -> None:
    save_int4(tmp_path / "int4", tiny_checkpoint("mamba2"))
    source, out = load_checkpoint(tmp_path / "int4"), tmp_path / "model.gguf"
    writer_of(source, "gguf")(out, source, dtype)
    kind = {"q8_0": "Q8_0", "bfloat16": "BF16"}[dtype]
    file = GgufFile(out)
    assert {file.dtype_of(f"blk.0.ssm_{name}.weight") for name in ("in", "out")} <= {
        kind,
        "bfloat16",
    }
    assert file.dtype_of("token_embd.weight") == file.dtype_of("blk.0.ssm_in.weight")
