"""RWKV-7 files: native and of fla-hub, the same model; what is wrong is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from model.checkpoint import Checkpoint, load_checkpoint
from model.config import ConfigError
from model.families.rwkv7.read import OTHER_FIELDS, read_native
from model.weights import CheckpointError
from model.weights.torch_file import TorchFile
from tests.rwkv7 import SHAPES, Published, fla_config, fla_names, published, write_fla, write_pth
from tests.tiny import tiny_tokenizer

SHAPE = SHAPES["square"]
Change = Callable[[Published], Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A native file with a tokenizer in the same folder."""
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    return write_pth(tmp_path / "model.pth", published(SHAPE))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_fla(tmp_path / "fla", fla_names(published(SHAPE)), fla_config(SHAPE))
    tiny_tokenizer().save(folder / "tokenizer.json")
    return folder


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    return checkpoint.model.parallel(torch.arange(2, 40)[None])


def test_file_is_a_model(file: Path) -> None:
    checkpoint = load_checkpoint(file)
    assert checkpoint.config == SHAPE.config
    assert {n: checkpoint.weights[n].shape for n in checkpoint.weights} == (
        checkpoint.config.weight_shapes()
    )
    weights = published(SHAPE)
    down = checkpoint.weights["blocks.1.time_mix.value_mix.down.weight"]
    assert np.array_equal(down, weights["blocks.1.att.v1"].T.numpy())


def test_digest_is_of_the_file_and_the_tokenizer(file: Path) -> None:
    first = load_checkpoint(file).digest
    assert load_checkpoint(file).digest == first
    write_pth(file, published(SHAPE, seed=1))
    assert load_checkpoint(file).digest != first


def test_tokenizer_may_be_elsewhere(file: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json or rwkv_vocab.*model\.pth"):
        load_checkpoint(shutil.copy(file, (tmp_path / "fla").mkdir() or tmp_path / "fla"))
    elsewhere = tmp_path / "fla" / "model.pth"
    assert load_checkpoint(elsewhere, tokenizer=tmp_path / "tokenizer.json").config == SHAPE.config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_their_float32(file: Path, dtype: torch.dtype) -> None:
    low = {key: tensor.to(dtype) for key, tensor in published(SHAPE).items()}
    write_pth(file, low)
    found = logits(load_checkpoint(file))
    write_pth(file, {key: tensor.float() for key, tensor in low.items()})
    assert torch.equal(found, logits(load_checkpoint(file)))


def test_unused_values_of_the_first_layer_are_ignored(file: Path) -> None:
    wanted, weights = logits(load_checkpoint(file)), published(SHAPE)
    for name in ("v0", "v1", "v2"):
        weights[f"blocks.0.att.{name}"] = weights[f"blocks.1.att.{name}"]
    write_pth(file, weights)
    assert torch.equal(logits(load_checkpoint(file)), wanted)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_folder_equals_the_file(file: Path, tmp_path: Path, fused: bool, shards: int) -> None:
    folder = tmp_path / "sharded"
    write_fla(folder, fla_names(published(SHAPE), fused), fla_config(SHAPE), shards)
    tiny_tokenizer().save(folder / "tokenizer.json")
    found, wanted = load_checkpoint(folder), load_checkpoint(file)
    assert found.config == wanted.config
    assert torch.equal(logits(found), logits(wanted))


@pytest.mark.parametrize("shards", [1, 2])
def test_folder_of_torch_files_equals_that_of_safetensors(
    folder: Path, tmp_path: Path, shards: int
) -> None:
    weights = fla_names(published(SHAPE))
    other = write_fla(tmp_path / "bin", weights, fla_config(SHAPE), shards, "pytorch_model.bin")
    tiny_tokenizer().save(other / "tokenizer.json")
    found, wanted = load_checkpoint(other), load_checkpoint(folder)
    assert found.config == wanted.config
    assert torch.equal(logits(found), logits(wanted))
    save_file(fla_names(published(SHAPE, seed=1)), other / "model.safetensors")
    assert not torch.equal(logits(load_checkpoint(other)), logits(wanted))


def test_torch_files_of_a_folder_are_checked_as_any_others(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    weights = fla_names(published(SHAPE))
    write_pth(folder / "pytorch_model.bin", {**weights, "model.extra": torch.arange(3)})
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin has an unknown key 'model.extra"
    ):
        load_checkpoint(folder)
    write_pth(folder / "pytorch_model.bin", {**weights, "model.norm.weight": print})
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: its pickle would call"):
        load_checkpoint(folder)
    index = {"weight_map": dict.fromkeys(weights, "pytorch_model-00001-of-00001.bin")}
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"pytorch_model-00001-of-00001\.bin: No such file"):
        load_checkpoint(folder)
    index["weight_map"] = {"x": "weights.pkl"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names a file of another kind: 'weights\.pkl'"):
        load_checkpoint(folder)


def test_one_layer_has_no_value_residual(file: Path) -> None:
    one = {k: t for k, t in published(SHAPE).items() if not k.startswith("blocks.1.")}
    write_pth(file, one)
    checkpoint = load_checkpoint(file)
    assert checkpoint.config.num_hidden_layers == 1
    assert logits(checkpoint).isfinite().all()


def drop(key: str) -> Change:
    return lambda weights: weights.pop(key)


def put(key: str, *shape: int) -> Change:
    return lambda weights: weights.update({key: torch.ones(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("emb.weight"), "lacks key 'emb.weight'"),
        (drop("ln_out.bias"), r"lacks key 'ln_out.bias' \(1 in all\)"),
        (drop("blocks.0.ln0.weight"), "lacks key 'blocks.0.ln0.weight'"),
        (drop("blocks.1.att.v2"), "lacks key 'blocks.1.att.v2'"),
        (drop("blocks.0.att.w1"), "lacks key 'blocks.0.att.w1'"),
        (put("extra", 3), r"has an unknown key 'extra' \(1 in all\)"),
        (put("blocks.0.att.g0", 128), "has an unknown key 'blocks.0.att.g0'"),
        (put("blocks.0.att.w1", 16, 128), r"blocks.0.att.w1 is \[16, 128\], wanted \[128, 128\]"),
        (put("blocks.1.att.a1", 128, 17), r"blocks.1.att.a1 is \[128, 17\], wanted \[128, 16\]"),
        (put("blocks.1.ffn.key.weight", 2, 2), r"blocks.1.ffn.key.weight is \[2, 2\], wanted"),
        (put("blocks.0.att.x_g", 64), r"blocks.0.att.x_g is \[64\], wanted \[128\]"),
        (put("blocks.0.att.r_k", 128), r"blocks.0.att.r_k is \[128\], wanted 2 axes"),
        (put("blocks.0.att.r_k", 3, 64), r"is \[3, 64\] for a width of 128: an attention_hidden_"),
        (put("blocks.0.ffn.key.qweight", 9, 9), "is packed for the kernels of rwkv7-hf"),
        (put("blocks.7.ln1.weight", 128), "lacks key 'blocks.2.att.x_r'"),
        (put(f"blocks.{'1' * 5000}.ln1.weight", 128), r"has an unknown key 'blocks\.1111"),
        (
            lambda weights: weights.update({"ln_out.bias": weights["ln_out.bias"].int()}),
            "ln_out.bias is of integers",
        ),
        (put("blocks.0.ffn.s_emb.weight", 9, 9), "is an RWKV-7a model"),
        (put("blocks.0.qkv.weight", 9, 9), "is an RWKV-7b model.*its state grows"),
        (put("blocks.0.ffn.enn.weight", 9, 9), "is an RWKV-8 model"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file: Path, change: Change, message: str) -> None:
    weights = published(SHAPE)
    change(weights)
    write_pth(file, weights)
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(file)
    assert str(error.value).startswith("model.pth")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "generation"),
    [
        (("time_maa_x", "time_decay", "ln_x.weight", "gate.weight"), "an RWKV-6 model"),
        (("time_mix_g", "time_decay", "ln_x.weight", "gate.weight"), "an RWKV-5 model"),
        (("time_mix_k", "time_decay", "time_first"), "an RWKV-4 or RWKV-5 model"),
        (("query.weight",), "not an RWKV-7 model: it has no key 'blocks.0.att.r_k'"),
    ],
)
def test_other_generations_are_refused_by_name(
    file: Path, keys: tuple[str, ...], generation: str
) -> None:
    write_pth(file, {f"blocks.0.att.{key}": torch.ones(4) for key in keys})
    with pytest.raises(CheckpointError, match=f"model.pth is {generation}"):
        read_native(TorchFile(file), file.name)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attn", {"layers": [1]}, "rwkv7: attn .* is not supported"),
        ("hidden_act", "relu", "rwkv7: hidden_act 'relu' is not supported"),
        ("norm_first", False, "rwkv7: norm_first False is not supported"),
        ("value_dim", [128, 256], "rwkv7: value_dim must be 128 in all layers"),
        ("hidden_size", 64, "rwkv7: hidden_size is 64, the weights have 128"),
        ("num_hidden_layers", 3, "rwkv7: num_hidden_layers is 3, the weights have 2"),
        ("decay_low_rank_dim", 8, "rwkv7: decay_low_rank_dim is 8, the weights have 16"),
        ("head_dim", 32, "rwkv7: head_dim is 32, the weights have 64"),
        ("layer_types", ["linear_attention", "full_attention"], "rwkv7: layer_types .* grows"),
        ("attention_hidden_size", 192, "attention_hidden_size is 192, the weights have 128"),
        ("surprise", 1, "rwkv7: unknown field 'surprise'"),
    ],
)
def test_config_that_asks_for_something_else_is_refused(
    folder: Path, field: str, value: object, message: str
) -> None:
    write_fla(folder, fla_names(published(SHAPE)), {**fla_config(SHAPE), field: value})
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize("field", ["value_dim", "num_heads", "a_low_rank_dim", "attn"])
def test_fields_may_be_missing_or_null(folder: Path, field: str) -> None:
    config = fla_config(SHAPE)
    del config[field]
    for each in (config, {**config, field: None}):
        write_fla(folder, fla_names(published(SHAPE)), each)
        assert load_checkpoint(folder).config == SHAPE.config


def test_other_names_of_the_fields_are_read(folder: Path) -> None:
    """Those of `Rwkv7ForCausalLM`, whose group norm has one epsilon for every head size."""
    config = fla_config(SHAPE)
    for other, name in OTHER_FIELDS.items():
        config[other] = config.pop(name)
    config |= {"attention_hidden_size": SHAPE.width, "head_size_divisor": 8}
    write_fla(folder, fla_names(published(SHAPE)), config)
    assert load_checkpoint(folder).config == SHAPE.config
    write_fla(folder, fla_names(published(SHAPE)), config | {"lora_rank_gate": 8})
    with pytest.raises(ConfigError, match="gate_low_rank_dim is 8, the weights have 32"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "values",
    [
        {**fla_config(SHAPE), "attn": {"layers": [1]}},
        {"d_model": 64, "n_layer": 2, "attn_layer_idx": [1], "ssm_cfg": {"layer": "Mamba2"}},
        *({"model_type": name} for name in ("qwen3_next", "kimi_linear", "minimax")),
        *({"model_type": name} for name in ("bamba", "zamba", "zamba2")),
        {"model_type": "plamo2"},
    ],
)
def test_models_whose_state_grows_are_refused_with_the_reason(
    folder: Path, values: dict[str, Any]
) -> None:
    write_fla(folder, fla_names(published(SHAPE)), values)
    with pytest.raises(ConfigError, match="some of its layers are attention, whose state grows"):
        load_checkpoint(folder)


def test_missing_key_of_a_folder_is_named(folder: Path) -> None:
    weights = fla_names(published(SHAPE))
    del weights["model.layers.1.attn.g_norm.bias"]
    write_fla(folder, weights, fla_config(SHAPE))
    message = r"model.safetensors lacks key 'model.layers.1.attn.g_norm.bias' \(1 in all\)"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("qwen3_next", "some of its layers are attention, whose state grows with the text"),
        ("bamba", "some of its layers are attention"),
        ("rwkv6", "of this family only RWKV-7 is"),
        ("hgrn2", "its keys are what its forget gates leave"),
        ("kda", "of fla, gla, retnet, linear_attn, gated_deltanet, delta_net"),
    ],
)
def test_other_families_are_refused_with_the_reason(
    folder: Path, model_type: str, reason: str
) -> None:
    write_fla(folder, fla_names(published(SHAPE)), {"model_type": model_type})
    with pytest.raises(ConfigError, match=f"{model_type} models are not supported: {reason}"):
        load_checkpoint(folder)
