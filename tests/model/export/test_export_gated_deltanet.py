"""Our delta as a gated_deltanet of flash-linear-attention: read back, and by its naive rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from model.config import ModelConfig
from model.export import writer_of
from model.lm import LanguageModel
from tests.model.foreign.conftest import tokens
from tests.model.foreign.test_fla_delta import SHARED, TOLERANCE, Theirs
from tests.tiny import tiny_tokenizer

CASES: list[dict[str, Any]] = [
    {},
    {"key_dim": 12, "conv_size": 3},
    {"key_dim": 4, "gate": False, "negative_eigenvalues": True},
]


def checkpoint(tied: bool = True, attention: str = "delta", **options: Any) -> Checkpoint:
    """With the sizes of `test_fla_delta`, and every weight random."""
    config = ModelConfig(
        vocab_size=tiny_tokenizer().vocab_size,
        hidden_size=SHARED["hidden_size"],
        num_hidden_layers=SHARED["num_hidden_layers"],
        num_attention_heads=3,
        head_dim=6,
        intermediate_size=SHARED["intermediate_size"],
        attention=attention,
        attention_options=options,
        tie_word_embeddings=tied,
    )
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: (0.3 * torch.randn(shape, generator=generator)).numpy() + name.endswith("norm.weight")
        for name, shape in config.weight_shapes().items()
    }
    return Checkpoint(config, weights, tiny_tokenizer(), "model")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_what_is_written_is_read_back_bit_for_bit(
    tmp_path: Path, options: dict[str, Any], tied: bool
) -> None:
    source = checkpoint(tied, **options)
    writer_of(source, "hf")(tmp_path, source, "float32")
    found = load_checkpoint(tmp_path)
    assert set(found.weights) == set(source.weights)
    for key, wanted in source.weights.items():
        assert np.array_equal(found.weights[key], wanted), key
    assert isinstance(found.model, LanguageModel)
    ids = tokens(20) % source.config.vocab_size
    assert torch.equal(found.model.parallel(ids), source.model.parallel(ids))


@pytest.mark.package
@pytest.mark.parametrize("options", CASES, ids=str)
def test_logits_equal_the_naive_operation_on_the_written_folder(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    source = checkpoint(tied=False, **options)
    writer_of(source, "hf")(tmp_path, source, "float32")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    theirs = Theirs(config)
    theirs.weights = load_file(tmp_path / "model.safetensors")
    ids = tokens(50) % source.config.vocab_size
    wanted, found = theirs.logits(ids), source.model.parallel(ids)
    scale = wanted.abs().max()
    torch.testing.assert_close(found[..., :300] / scale, wanted / scale, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conv_size": 0}, "a gated_deltanet has a convolution and a decay, the model has not"),
        ({"decay": False}, "a gated_deltanet has a convolution and a decay, the model has not"),
        ({"attention": "gated"}, "--format hf is not supported for gated models"),
    ],
    ids=str,
)
def test_model_that_the_family_has_not_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    source = checkpoint(**options)
    with pytest.raises(CheckpointError, match=message):
        writer_of(source, "hf")(tmp_path, source, "float32")


def test_blocks_of_another_kind_are_refused(tmp_path: Path) -> None:
    source = checkpoint()
    assert isinstance(source.config, ModelConfig)
    other = replace(source, config=replace(source.config, attention_bias=True))
    with pytest.raises(CheckpointError, match="has RMS norms, a SwiGLU and no biases"):
        writer_of(other, "hf")(tmp_path, other, "float32")
