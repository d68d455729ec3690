"""A tuned state is what the recurrence begins with; one of another model is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from model.architectures.network import ModelState, model_of
from model.checkpoint import load_checkpoint
from model.config import ModelConfig
from model.export import writer_of
from model.families.rwkv7.read import read_native
from model.foreign.tuned_states import read_tuned_state
from model.state import StateLayout
from model.weights import CheckpointError
from model.weights.torch_file import TorchFile
from server.cli.main import app
from tests.model.architectures.rwkv7_oracle import oracle
from tests.model.attention.test_contract import assert_close
from tests.rwkv7 import SHAPES, Published, published, write_pth
from tests.tiny import tiny_tokenizer

SHAPE = SHAPES["odd"]
CONFIG = SHAPE.config


def time_states(
    num_layers: int = CONFIG.num_hidden_layers,
    heads: int = CONFIG.num_attention_heads,
    dim: int = CONFIG.head_dim,
    **changed: torch.Tensor,
) -> Published:
    """As state tuning writes them, in no way symmetric."""
    generator = torch.Generator().manual_seed(3)
    states = {
        f"blocks.{layer}.att.time_state": torch.randn(heads, dim, dim, generator=generator)
        for layer in range(num_layers)
    }
    return {**states, **changed}


def write(path: Path, states: Published) -> Path:
    if path.suffix == ".pth":
        write_pth(path, states)
    else:
        save_file(states, path)
    return path


@pytest.mark.parametrize("name", ["state.pth", "state.safetensors"])
def test_recurrence_begins_with_the_matrix_of_the_file(tmp_path: Path, name: str) -> None:
    """The file's matrix has values as rows, as the published kernel's state does."""
    states, weights = time_states(), published(SHAPE)
    wanted, _ = oracle(weights, [3, 1, 4, 1, 5], states)
    without, _ = oracle(weights, [3, 1, 4, 1, 5])
    block = read_tuned_state(write(tmp_path / name, states), CONFIG)
    model_file = write_pth(tmp_path / "model.pth", weights)
    model = model_of(*read_native(TorchFile(model_file), model_file.name))
    layers = StateLayout.of(CONFIG).views(block[None].copy())
    state: ModelState = [
        {key: torch.from_numpy(tensor) for key, tensor in layer.items()} for layer in layers
    ]
    logits, _ = model.chunk(torch.tensor([[3, 1, 4, 1, 5]]), state, torch.tensor([0]))
    assert_close(logits[0], wanted)
    assert not torch.allclose(wanted, without, rtol=0.01, atol=0.01)


def test_transposed_file_is_the_same_state(tmp_path: Path) -> None:
    states = time_states()
    other = {key: tensor.transpose(1, 2).contiguous() for key, tensor in states.items()}
    wanted = read_tuned_state(write(tmp_path / "state.pth", states), CONFIG)
    file = write(tmp_path / "other.pth", other)
    assert np.array_equal(read_tuned_state(file, CONFIG, transposed=True), wanted)
    assert not np.array_equal(read_tuned_state(file, CONFIG), wanted)


def test_numbers_of_16_bits_are_read(tmp_path: Path) -> None:
    states = {key: tensor.bfloat16() for key, tensor in time_states().items()}
    wide = {key: tensor.float() for key, tensor in states.items()}
    found = read_tuned_state(write(tmp_path / "half.pth", states), CONFIG)
    wanted = read_tuned_state(write(tmp_path / "wide.pth", wide), CONFIG)
    assert np.array_equal(found, wanted)


KEY = "blocks.0.att.time_state"


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (time_states(CONFIG.num_hidden_layers + 1), "is a state of .* layers, and the model has"),
        (time_states(1), "is a state of 1 layers, and the model has"),
        (time_states(**{KEY: torch.zeros(1, 2, 2)}), rf"{KEY} is \[1, 2, 2\], and the model has"),
        (time_states(emb=torch.zeros(2)), "has an unknown key 'emb'"),
        ({"emb": torch.zeros(2)}, f"is not a tuned state: it has no key '{KEY}'"),
        (
            time_states(**{KEY: torch.full_like(time_states()[KEY], float("nan"))}),
            "the state of layer 0 is not finite",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused(
    tmp_path: Path, states: Published, message: str
) -> None:
    file = write(tmp_path / "state.pth", states)
    with pytest.raises(CheckpointError, match=f"state.pth.*{message}"):
        read_tuned_state(file, CONFIG)


def test_family_without_tuned_states_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "state.pth", time_states())
    with pytest.raises(CheckpointError, match="tuned states of gated models are not known"):
        read_tuned_state(file, ModelConfig(vocab_size=300, attention="gated"))


def test_weights_of_a_model_are_no_state(tmp_path: Path) -> None:
    file = write_pth(tmp_path / "model.pth", published(SHAPE))
    with pytest.raises(CheckpointError, match="is not a tuned state"):
        read_tuned_state(file, CONFIG)


def test_state_that_is_merged_into_the_weights_is_apart_from_them(tmp_path: Path) -> None:
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    states, weights = time_states(2, heads=2, dim=64), published(SHAPES["square"])
    plain = load_checkpoint(write_pth(tmp_path / "plain.pth", weights))
    merged = load_checkpoint(write_pth(tmp_path / "merged.pth", weights | states))
    wanted = read_tuned_state(write(tmp_path / "state.pth", states), plain.config)
    assert plain.tuned_state is None
    assert np.array_equal(merged.tuned_state, wanted)
    assert list(merged.weights) == list(plain.weights)
    assert merged.digest != plain.digest
    writer_of(merged, "pth")(tmp_path / "again.pth", merged, "bfloat16")
    assert np.array_equal(load_checkpoint(tmp_path / "again.pth").tuned_state, wanted)
    for key in states:
        write_pth(tmp_path / "part.pth", {k: t for k, t in (weights | states).items() if k != key})
        with pytest.raises(
            CheckpointError, match=r"part\.pth is a state of 1 layers, and the model"
        ):
            load_checkpoint(tmp_path / "part.pth")


def test_export_says_which_formats_have_no_place_for_a_merged_state(tmp_path: Path) -> None:
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    weights = published(SHAPES["square"]) | time_states(2, heads=2, dim=64)
    file = write_pth(tmp_path / "merged.pth", weights)
    for out, format in (("a.gguf", "gguf"), ("folder", "hf"), ("b.pth", "pth")):
        words = ["export", str(file), str(tmp_path / out), "--format", format]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert ("tuned state is left out: only pth has it" in result.stderr) == (format != "pth")
    result = CliRunner().invoke(app, ["quantize", str(file), str(tmp_path / "int8")])
    assert "tuned state is left out" in result.stderr
    shown = CliRunner().invoke(app, ["inspect", str(file)]).stdout
    assert "merged in" in shown
