"""Sizes that a file of some hundred bytes states: none makes memory before the keys are compared.

Every family of the registries is read here, so that a new one is too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from model.architectures import ARCHITECTURES, load_class
from model.attention import MECHANISMS
from model.config import ModelConfig
from model.foreign import GGUF_READERS, READERS
from model.weights import MIN_LAYER_KEYS
from tests.fuzz.run import Case, Child
from tests.gguf_files import byte_level_vocabulary, finish
from tests.tiny import tiny_tokenizer, write_model

#: Enough for one layer, so that the other sizes are looked at.
NUM_KEYS = 12
MANY = 1 << 24
#: What configs call the number of layers.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "block_count")
#: What they call the other sizes, in all families; a reader takes some of them.
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "d_model": 64,
    "dim": 64,
    "n_embd": 64,
    "n_head": 4,
    "n_inner": 64,
    "n_positions": 64,
    "num_heads": 8,
    "max_position_embeddings": 64,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "num_kv_heads": 2,
    "num_v_heads": 8,
    "conv_size": 4,
    "hidden_ratio": 4,
    "n_groups": 1,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "conv_L_cache": 3,
    "pad_vocab_size_multiple": 8,
    "expand_k": 1,
    "expand_v": 1,
    "head_size": 16,
    "num_wkv_heads": 4,
    "time_step_rank": 4,
    "block_multiple_of": 16,
}
GGUF_SIZES = {
    "embedding_length": 64,
    "feed_forward_length": 64,
    "context_length": 64,
    "vocab_size": 300,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 16,
    "ssm.group_count": 4,
    "ssm.time_step_rank": 4,
    "ssm.state_size": 16,
    "ssm.inner_size": 64,
    "ssm.conv_kernel": 4,
    "shortconv.l_cache": 3,
    "full_attention_interval": 4,
    "wkv.head_size": 16,
}
#: Readers that take the number of layers from the keys, and refuse files that have none.
FROM_KEYS = ("read_rwkv7", "read_arwkv7")
GGUF_FROM_KEYS = ("rwkv7", "arwkv7")


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    good = tmp_path_factory.mktemp("good")
    write_model(good)
    errors = str(good.with_name("errors"))
    with Child([Case("model", str(good), {"errors": errors})]) as child:
        yield child


def config_of(model_type: str) -> dict[str, Any]:
    """A config of a foreign family, with the sizes of all of them."""
    config: dict[str, Any] = {"model_type": model_type, **SIZES, "eos_token_id": 0}
    if model_type == "qwen3_5":
        config = {"model_type": model_type, "text_config": config | {"model_type": "qwen3_5_text"}}
    if model_type == "rwkv":
        config["architecture_version"] = "rwkv7"
    if model_type == "jamba":
        config["num_experts"] = 1  # more are refused before anything else
    if model_type == "mistral_mamba":
        config["model_type"] = "mamba"
    if model_type == "mamba_ssm":
        del config["model_type"]
    return config


def changed(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """``config`` with `MANY` under each of these names."""
    many = dict.fromkeys(names, MANY)
    if isinstance(text := config.get("text_config"), dict):
        return {**config, "text_config": text | many}
    return config | many


def write_folder(folder: Path, config: dict[str, Any], model_type: str) -> Path:
    """A folder with tensors that no model has."""
    folder.mkdir()
    name = "params.json" if model_type == "mistral_mamba" else "config.json"
    (folder / name).write_text(json.dumps(config))
    save_file({f"x{n}": torch.zeros(1) for n in range(NUM_KEYS)}, folder / "model.safetensors")
    tiny_tokenizer().save(folder / "tokenizer.json")
    return folder


def read(child: Child, path: Path) -> str:
    """The message; raises AssertionError unless the files are refused within the bounds."""
    what, message = child.attempt(Case("model", str(path), {}))
    assert what == "refused", message
    return message


@pytest.mark.parametrize("model_type", READERS)
def test_folder_of_many_layers_is_refused_by_its_keys(
    child: Child, tmp_path: Path, model_type: str
) -> None:
    config = changed(config_of(model_type), *LAYERS)
    message = read(child, write_folder(tmp_path / "model", config, model_type))
    if READERS[model_type][1] in FROM_KEYS:
        assert "is not an RWKV-7 model" in message or "lacks key" in message
    else:
        assert f"has {NUM_KEYS} keys, too few for {MANY} layers" in message


@pytest.mark.parametrize("model_type", READERS)
def test_large_sizes_of_a_folder_are_refused(child: Child, tmp_path: Path, model_type: str) -> None:
    for name in (*SIZES, "layer_types", "full_attn_idxs"):
        config = changed(config_of(model_type) | {"num_hidden_layers": 1}, name)
        read(child, write_folder(tmp_path / name, config, model_type))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_large_sizes_of_our_own_folder_are_refused(
    child: Child, tmp_path: Path, model_type: str
) -> None:
    config = {"model_type": model_type, "vocab_size": 300}
    for field in fields(load_class(ARCHITECTURES[model_type].config)):
        if field.type != "int" or "token_id" in field.name:
            continue
        path = write_folder(tmp_path / field.name, changed(config, field.name), model_type)
        message = read(child, path)
        if field.name == "num_hidden_layers":
            assert f"has {NUM_KEYS} keys, too few for {MANY} layers" in message


def write_gguf(path: Path, family: str, sizes: dict[str, int]) -> Path:
    writer = GGUFWriter(path, family)
    for name, size in sizes.items():
        writer.add_uint32(f"{family}.{name}", size)
    byte_level_vocabulary(tiny_tokenizer(), 300)(writer)
    writer.add_tensor("token_embd.weight", np.zeros((300, 64), np.float32))
    for number in range(NUM_KEYS - 1):
        writer.add_tensor(f"x{number}", np.zeros(32, np.float32))
    finish(writer)
    return path


@pytest.mark.parametrize("family", GGUF_READERS)
def test_large_sizes_of_gguf_are_refused(child: Child, tmp_path: Path, family: str) -> None:
    for name in (*LAYERS, *GGUF_SIZES):
        sizes = GGUF_SIZES | {"block_count": 1, name: MANY}
        message = read(child, write_gguf(tmp_path / f"{name}.gguf", family, sizes))
        if name == "block_count" and family not in GGUF_FROM_KEYS:
            assert f"has {NUM_KEYS} keys, too few for {MANY} layers" in message


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_no_layer_has_fewer_weights_than_the_bound(model_type: str) -> None:
    config = load_class(ARCHITECTURES[model_type].config)(vocab_size=300, num_hidden_layers=1)
    names = [name for name in config.weight_shapes() if name.startswith("blocks.0.")]
    assert len(names) >= MIN_LAYER_KEYS


def test_no_layer_of_ours_has_fewer_weights_than_the_bound() -> None:
    for attention in MECHANISMS:
        config = ModelConfig(vocab_size=300, num_hidden_layers=1, attention=attention)
        blocks = [name for name in config.weight_shapes() if name.startswith("blocks.0.")]
        assert len(blocks) >= MIN_LAYER_KEYS, attention
