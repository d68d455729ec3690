"""Smaller checkpoints: what is in the file, what comes out of it, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from model.checkpoint_files import read_weights
from model.config import ModelConfig
from model.lm import LanguageModel
from model.native.runtime import Runtime
from model.quantization.quantize import quantize_rows, save_quantized
from model.weights import CheckpointError, is_quantized
from tests.tiny import tiny_checkpoint, tiny_tokenizer
from tests.weights import weights_of

NAME = "model.safetensors"
TOKENS = [5, 70, 33, 250, 8, 8, 101]
EMBEDDING = "embedding.weight"


def checkpoint_of(**settings: object) -> Checkpoint:
    """A tiny model of random weights, biases and norms included."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 20}
    heads = {"num_attention_heads": 2, "head_dim": 8}
    tokenizer = tiny_tokenizer()
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **sizes, **heads, **settings)  # type: ignore[arg-type]
    model = LanguageModel(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return Checkpoint(config, weights_of(model), tokenizer, digest="random")


def logits(checkpoint: Checkpoint, dtype: str) -> bytes:
    runtime = Runtime(checkpoint.config, checkpoint.weights, dtype)
    runtime.run(runtime.empty_pool(1), [0], [0], [TOKENS], [runtime.draw()])
    assert np.ptp(runtime.logits()) > 0.1
    return runtime.logits().tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with its large matrices as int8."""
    save_quantized(tmp_path / "int8", tiny_checkpoint(), "int8")
    return tmp_path / "int8"


def test_rows_are_rounded_to_the_nearest_step_of_their_own_scale() -> None:
    matrix = np.array([[127, 1.5, 2.5, -0.4], [-0.254, 0.1, 0, 0.001]], np.float32)
    steps, scale = quantize_rows(matrix)
    assert steps.dtype == np.int8
    assert steps.tolist() == [[127, 2, 2, 0], [-127, 50, 0, 0]]
    assert scale.dtype == np.float32
    assert scale == pytest.approx([1.0, 0.002])


def test_row_of_zeros_stays_zero() -> None:
    steps, scale = quantize_rows(np.array([[0, 0], [0, -3]], np.float32))
    assert steps.tolist() == [[0, 0], [0, -127]]
    assert scale[0] == 0


def test_large_matrices_are_int8_and_come_out_as_their_product(folder: Path) -> None:
    stored, read, before = load_file(folder / NAME), read_weights(folder), tiny_checkpoint().weights
    int8 = {name for name, tensor in stored.items() if tensor.dtype == torch.int8}
    ends = ("qkv.weight", "gate.weight", "out.weight", "mlp.up.weight", "mlp.down.weight")
    assert int8 == {n for n in before if n.endswith(ends) or n == EMBEDDING}
    assert read.keys() == before.keys()
    assert is_quantized(read)
    for name in int8:
        product = stored[name].float() * stored[name + ".scale"].unsqueeze(1)
        assert read[name].dtype == np.float32
        assert read[name].tobytes() == product.numpy().tobytes()
        half_step = stored[name + ".scale"].numpy()[:, None] / 2
        assert (np.abs(read[name] - before[name]) <= half_step * 1.0001).all()


def test_small_weights_keep_every_bit(folder: Path) -> None:
    stored, read, before = load_file(folder / NAME), read_weights(folder), tiny_checkpoint().weights
    small = [name for name in before if stored[name].dtype != torch.int8]
    assert "blocks.1.attention.decay_down.weight" in small
    assert all(read[name].tobytes() == before[name].tobytes() for name in small)


def test_small_weights_that_were_bfloat16_stay_so(tmp_path: Path) -> None:
    tiny = tiny_checkpoint()
    save_checkpoint(tmp_path / "short", tiny.model, tiny.tokenizer, torch.bfloat16)
    save_quantized(tmp_path / "int8", load_checkpoint(tmp_path / "short"), "int8")
    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "int8" / NAME).items()}
    floats = {n for n, dtype in dtypes.items() if dtype == torch.float32}
    assert floats == {n for n in dtypes if n.endswith(".scale")}


@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "gated"},
        {"attention": "delta", "tie_word_embeddings": False},
        {"attention": "elu", "attention_bias": True, "norm": "layer", "mlp": "gelu"},
        {"attention": "performer", "max_position_embeddings": 5},
        {"attention": "vq"},
    ],
    ids=lambda settings: settings["attention"],
)
def test_native_int8_is_bit_for_bit_that_of_the_original(
    settings: dict[str, object], tmp_path: Path
) -> None:
    original = checkpoint_of(**settings)
    save_quantized(tmp_path, original, "int8")
    quantized = load_checkpoint(tmp_path)
    assert logits(quantized, "int8") == logits(original, "int8")
    assert logits(quantized, "float32") != logits(original, "float32")


def test_quantizing_again_changes_nothing(folder: Path, tmp_path: Path) -> None:
    save_quantized(tmp_path / "again", load_checkpoint(folder), "int8")
    assert (tmp_path / "again" / NAME).read_bytes() == (folder / NAME).read_bytes()


def test_torch_runs_a_quantized_folder(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    state, position = checkpoint.model.empty_state(1), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        ours, _ = checkpoint.model.chunk(torch.tensor([TOKENS]), state, position)
    native = np.frombuffer(logits(checkpoint, "float32"), np.float32)
    assert native == pytest.approx(ours[0, -1].numpy(), abs=1e-4)


def test_digest_names_the_numbers_that_are_served(folder: Path, tmp_path: Path) -> None:
    tiny = tiny_checkpoint()
    save_checkpoint(tmp_path / "before", tiny.model, tiny.tokenizer)
    assert load_checkpoint(folder).digest != load_checkpoint(tmp_path / "before").digest


def test_bfloat16_is_that_of_torch(tmp_path: Path) -> None:
    tiny = tiny_checkpoint()
    save_quantized(tmp_path / "ours", tiny, "bfloat16")
    save_checkpoint(tmp_path / "theirs", tiny.model, tiny.tokenizer, torch.bfloat16)
    ours, theirs = load_file(tmp_path / "ours" / NAME), load_file(tmp_path / "theirs" / NAME)
    assert ours.keys() == theirs.keys()
    assert all(t.dtype == torch.bfloat16 and torch.equal(ours[n], t) for n, t in theirs.items())
    assert not is_quantized(read_weights(tmp_path / "ours"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    tiny = tiny_checkpoint()
    weights = {**tiny.weights, EMBEDDING: np.full_like(tiny.weights[EMBEDDING], value)}
    broken = Checkpoint(tiny.config, weights, tiny.tokenizer, tiny.digest)
    with pytest.raises(CheckpointError, match=r"embedding\.weight is not finite"):
        save_quantized(tmp_path / "out", broken, "int8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({EMBEDDING + ".scale": None}, "embedding.weight is of integers and has no embedding"),
        ({EMBEDDING: torch.zeros(300, 32)}, "unknown key 'embedding.weight.scale'"),
        ({EMBEDDING: None}, "lacks key 'embedding.weight'"),
        ({EMBEDDING + ".scale": torch.ones(32)}, r"scale is F32 \[32\], wanted F32 \[300\]"),
        ({EMBEDDING + ".scale": torch.ones(300, 1)}, r"scale is F32 \[300, 1\], wanted F32"),
        ({EMBEDDING + ".scale": torch.ones(300).half()}, r"is F16 \[300\], wanted F32 \[300\]"),
        ({EMBEDDING: torch.ones(32, 300).char()}, r"wanted F32 \[32\]"),
        ({"norm.weight": torch.ones(32).int()}, "norm.weight is of integers"),
    ],
)
def test_damaged_folders_are_refused(
    folder: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = {**load_file(folder / NAME), **change}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / NAME)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)
