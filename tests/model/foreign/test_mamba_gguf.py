"""Mamba in GGUF: the model of the folder; llama.cpp reads the same file and writes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model import foreign
from model.checkpoint import CheckpointError, load_checkpoint
from model.config import ConfigError
from model.native.runtime import Runtime
from model.weights import is_quantized
from model.weights.gguf_file import GgufFile
from tests.gguf_files import Tensors, byte_level_vocabulary
from tests.hybrid_gguf import numbered_vocabulary
from tests.mamba import SHAPES, drawn
from tests.mamba_gguf import mamba_tensors, write_mamba
from tests.model.architectures.rwkv7_llama import llama_logprobs
from tests.model.ops.cpu.models import feed
from tests.tiny import tiny_tokenizer

Change = Callable[[Tensors], object]
#: Rounding of a logarithm and of its exponential, relative to the largest weight.
LOG_TOLERANCE = 1e-6
#: Distance of the log probabilities from llama.cpp's with the same file, relative to how much they
#: differ. It rounds inputs of BF16 products to this type, and of Q8_0 and Q4_0 products to Q8_0,
#: in blocks of 32, where we round whole rows; float32 differs by the order of sums.
LLAMA_TOLERANCES = {
    "F32": ("float32", 2e-5),
    "BF16": ("bfloat16", 1e-2),
    "Q8_0": ("int8", 0.1),
    "Q4_0": ("int4", 0.1),
}
LLAMA_CASES = [
    *((name, "F32") for name in ("grouped", "head", "first", "falcon")),
    *((name, kind) for name in ("grouped", "first") for kind in ("BF16", "Q8_0", "Q4_0")),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("name", SHAPES)
def test_file_is_the_model_of_its_weights(path: Path, name: str) -> None:
    config, weights = foreign.read_gguf(GgufFile(write_mamba(path, name)), path.name)
    if name == "falcon":  # the file has one epsilon
        assert config == SHAPES[name].__class__(**{**vars(SHAPES[name]), "mixer_norm_eps": 1e-5})
    else:
        assert config == SHAPES[name]
    assert set(weights) == set(drawn(name))
    for key, wanted in drawn(name).items():
        assert weights[key].shape == weights.shape(key) == wanted.shape, key
        difference = np.abs(np.asarray(weights[key]) - wanted).max()
        assert difference <= (LOG_TOLERANCE if key.endswith("A_log") else 0.0), key
        assert np.array_equal(weights.rows(key, 1, 2), weights[key][1:2]), key


def test_tokenizer_inside_is_taken_and_padding_is_never_drawn(path: Path) -> None:
    write_mamba(path, "head", fill=byte_level_vocabulary(tiny_tokenizer(), 310))
    checkpoint = load_checkpoint(path)
    assert checkpoint.tokenizer.vocab_size == 300
    assert checkpoint.config.vocab_size == 310


def test_older_files_with_vectors_in_the_place_of_columns_are_read(path: Path) -> None:
    tensors = mamba_tensors(SHAPES["head"], drawn("head"))
    older = {
        key: data[:, 0] if key.endswith(("ssm_a", "ssm_d")) else data
        for key, data in tensors.items()
    }
    _, weights = foreign.read_gguf(GgufFile(write_mamba(path, "head", tensors=older)), path.name)
    for key in ("blocks.0.mixer.A_log", "blocks.1.mixer.D"):
        assert np.abs(np.asarray(weights[key]) - drawn("head")[key]).max() <= LOG_TOLERANCE


@pytest.mark.parametrize("is_same", [True, False])
def test_head_next_to_the_embedding_is_its_copy_or_another(path: Path, is_same: bool) -> None:
    tensors = mamba_tensors(SHAPES["head"], drawn("head"))
    tensors["output.weight"] = tensors["token_embd.weight"] + np.float32(not is_same)
    config, weights = foreign.read_gguf(
        GgufFile(write_mamba(path, "head", tensors=tensors)), path.name
    )
    assert ("head.weight" in weights) is not is_same
    assert ("head.weight" in config.weight_shapes()) is not is_same


@pytest.mark.parametrize(("kind", "error"), [("BF16", 3e-2), ("F16", 4e-3), ("Q8_0", 5e-2)])
@pytest.mark.parametrize("name", ["head", "first"])
def test_lower_precisions_are_the_same_model_with_their_error(
    path: Path, name: str, kind: str, error: float
) -> None:
    vocabulary = byte_level_vocabulary(tiny_tokenizer(), 310)
    exact, found = (
        load_checkpoint(write_mamba(path.with_stem(each), name, each, vocabulary))
        for each in ("F32", kind)
    )
    assert is_quantized(found.weights) == (kind == "Q8_0")
    tokens = torch.arange(2, 40)[None]
    wanted = exact.model.parallel(tokens)
    difference = (found.model.parallel(tokens) - wanted).std() / wanted.std()
    assert error / 100 < difference < error


@pytest.mark.package
@pytest.mark.parametrize(("name", "kind"), LLAMA_CASES)
def test_llama_cpp_says_the_same_of_the_same_file(path: Path, name: str, kind: str) -> None:
    """Every id's probability at 300 places, and in float32 the greedy token at each."""
    dtype, tolerance = LLAMA_TOLERANCES[kind]
    size = SHAPES[name].vocab_size
    write_mamba(path, name, kind, numbered_vocabulary(size))
    prompt = list(range(3, 40))
    ids, logprobs = llama_logprobs(path, prompt, 300, size)
    runtime = Runtime(*foreign.read_gguf(GgufFile(path), path.name), dtype)
    rows = torch.from_numpy(feed(runtime, runtime.empty_pool(1), 0, prompt + ids[:-1]))[36:]
    found = rows.log_softmax(dim=-1)
    wanted = torch.tensor(logprobs)
    assert (found - wanted).square().mean().sqrt() <= tolerance * wanted.std()
    if kind == "F32":
        rows[:, 0] = -torch.inf  # the end, as it was told to continue
        assert rows.argmax(dim=-1).tolist() == ids
    if name in ("grouped", "falcon"):
        assert len(set(ids)) > 20  # not one token again and again


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("token_embd.weight"), "token_embd.weight is missing, or no matrix"),
        (drop("output_norm.weight"), r"lacks key 'output_norm.weight' \(1 in all\)"),
        (drop("blk.1.ssm_a"), "lacks key 'blk.1.ssm_a'"),
        (drop("blk.0.ssm_conv1d.bias"), "lacks key 'blk.0.ssm_conv1d.bias'"),
        (put("extra", 3), r"has an unknown key 'extra' \(1 in all\)"),
        (put("blk.2.attn_norm.weight", 64), "has an unknown key 'blk.2.attn_norm.weight'"),
        (put("blk.0.ssm_norm.weight", 2, 3), r"ssm_norm.weight is \[2, 3\], wanted \[128\]"),
        (put("blk.0.attn_q.weight", 2, 2), "are not supported: some of its layers are attention"),
    ],
)
def test_what_is_wrong_in_the_tensors_is_named(path: Path, change: Change, message: str) -> None:
    tensors = mamba_tensors(SHAPES["head"], drawn("head"))
    change(tensors)
    write_mamba(path, "head", tensors=tensors)
    with pytest.raises((CheckpointError, ConfigError), match=message) as error:
        foreign.read_gguf(GgufFile(path), path.name)
    assert str(error.value).startswith("model.gguf")


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("head", "ssm.state_size", None, "ssm.state_size is missing"),
        ("head", "ssm.state_size", 64, "is .*, wanted"),
        ("head", "ssm.time_step_rank", 3, "ssm.time_step_rank must divide ssm.inner_size 128"),
        ("head", "ssm.group_count", 3, "num_groups must divide 2 heads, not 3"),
        ("head", "ssm.conv_kernel", 3, "is .*, wanted"),
        ("head", "block_count", 3, "lacks key 'blk.2"),
        ("head", "block_count", 5000, "keys, too few for 5000 layers"),
        ("head", "embedding_length", 65, "embedding_length is 65, the tensors have 64"),
        ("head", "ssm.dt_b_c_rms", True, "unknown field 'ssm.dt_b_c_rms'"),
        ("first", "ssm.dt_b_c_rms", 3, "ssm.dt_b_c_rms must be a boolean, not 3"),
        ("first", "ssm.time_step_rank", 5, "is .*, wanted"),
        ("first", "attention.layer_norm_rms_epsilon", 2.0, r"norm_eps must be in \(0, 1\)"),
        ("first", "ssm.group_count", 1, "unknown field 'ssm.group_count'"),
    ],
)
def test_metadata_that_says_something_else_is_refused(
    path: Path, name: str, key: str, value: Any, message: str
) -> None:
    write_mamba(path, name, change={key: value})
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_checkpoint(path)
