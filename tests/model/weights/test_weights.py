"""Weights without torch: the same numbers, keys and shapes as the torch model has."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from model.checkpoint_files import read_weights
from model.config import ModelConfig
from model.lm import LanguageModel
from model.weights import CheckpointError, check_weights, num_parameters
from tests.model.attention.test_contract import CASES, Case, case_id
from tests.tiny import tiny_checkpoint

NAME = "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_floating_point_comes_out_as_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.tensor([[0.1, -3e4, 0.0], [1e-6, float("inf"), -0.0]], dtype=dtype)
    save_file({"odd": torch.ones(3, dtype=torch.int8), "x": tensor}, tmp_path / NAME)
    found = read_weights(tmp_path)["x"]
    assert found.dtype == np.float32
    assert found.flags.aligned
    assert found.tobytes() == tensor.float().numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_integers_come_out_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.tensor([1, 0, 100]).to(dtype)
    save_file({"x": tensor}, tmp_path / NAME)
    found = read_weights(tmp_path)["x"]
    assert found.dtype == tensor.numpy().dtype
    assert found.tolist() == tensor.tolist()


def test_other_dtypes_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / NAME)
    weights = read_weights(tmp_path)
    assert weights.shape("x") == (4,)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: x has the unknown dtype F8"):
        weights["x"]


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 0)])
def test_scalars_and_empty_tensors_have_their_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    save_file({"x": torch.zeros(shape), "y": torch.zeros(shape).bfloat16()}, tmp_path / NAME)
    weights = read_weights(tmp_path)
    assert [weights[name].shape for name in sorted(weights)] == [shape, shape]
    assert [weights.shape(name) for name in sorted(weights)] == [shape, shape]


def test_damaged_file_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.ones(100)}, tmp_path / NAME)
    data = (tmp_path / NAME).read_bytes()
    for damaged in (b"", data[:4], data[:-4], data + b"more", b"\xff" * 8 + data[8:]):
        (tmp_path / NAME).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
            read_weights(tmp_path)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_shapes_are_those_of_the_torch_model(case: Case) -> None:
    assert_shapes(attention=case[0], attention_options=case[1])


@pytest.mark.parametrize(
    "settings",
    [
        {"norm": "layer", "mlp": "gelu", "attention_bias": True, "max_position_embeddings": 7},
        {"tie_word_embeddings": False, "attention": "elu", "attention_bias": True},
    ],
    ids=["gpt2", "untied"],
)
def test_shapes_of_other_families_are_those_of_the_torch_model(settings: dict[str, object]) -> None:
    assert_shapes(**settings)


def assert_shapes(**settings: object) -> None:
    config = ModelConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=8,
        intermediate_size=20,
        **settings,  # type: ignore[arg-type]
    )
    model = LanguageModel(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert config.weight_shapes() == wanted
    assert num_parameters(config) == model.num_parameters()


def test_layers_that_the_weights_cannot_have_take_no_memory() -> None:
    checkpoint = tiny_checkpoint()
    config = replace(checkpoint.config, num_hidden_layers=5_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="too few for 5000000 layers"):
            check_weights(config, checkpoint.weights)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
