"""ARWKV's folders and GGUF files are the same model; what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType

from model.checkpoint import Checkpoint, load_checkpoint
from model.config import ConfigError
from model.families.rwkv7.chat import CHAT_ML
from model.weights import CheckpointError, is_quantized
from tests.arwkv7 import (
    SHAPES,
    folder_config,
    gguf_tensors,
    our_weights,
    published,
    write_folder,
    write_gguf,
)
from tests.gguf_files import Tensors, byte_level_vocabulary
from tests.rwkv7 import Published
from tests.tiny import tiny_tokenizer

SHAPE = SHAPES["plain"]
FILL = byte_level_vocabulary(tiny_tokenizer(), SHAPE.vocab_size)
MIX = "model.layers.0.self_attn.time_mixer."
Change = Callable[[dict[str, Any]], object]


def write(folder: Path, name: str = "plain", **fields: Any) -> Path:
    shape = SHAPES[name]
    config = {**folder_config(shape), **fields}
    return write_folder(folder, published(shape), config, tiny_tokenizer())


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    return checkpoint.model.parallel(torch.arange(2, 40)[None])


@pytest.mark.parametrize("name", ["plain", "gated", "normed", "both"])
def test_folder_and_gguf_are_the_model(tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    folder = load_checkpoint(write(tmp_path / "folder", name))
    tensors = gguf_tensors(shape, published(shape))
    file = load_checkpoint(write_gguf(tmp_path / "model.gguf", shape, tensors, FILL))
    assert folder.config == shape.config
    wanted = our_weights(shape, published(shape))
    assert {n: folder.weights[n].shape for n in folder.weights} == shape.config.weight_shapes()
    for key in wanted:
        assert np.array_equal(folder.weights[key], wanted[key]), key
        assert np.array_equal(file.weights[key], wanted[key]), key
    assert torch.equal(logits(folder), logits(file))


@pytest.mark.parametrize("kind", ["BF16", "F16", "Q8_0"])
def test_lower_precisions_are_the_same_model_with_their_error(tmp_path: Path, kind: str) -> None:
    tensors = gguf_tensors(SHAPE, published(SHAPE))
    checkpoint = load_checkpoint(write_gguf(tmp_path / "a.gguf", SHAPE, tensors, FILL, kind))
    exact = logits(load_checkpoint(write(tmp_path / "folder")))
    assert is_quantized(checkpoint.weights) == (kind == "Q8_0")
    error = (logits(checkpoint) - exact).std() / exact.std()
    assert 1e-5 < error < 5e-2


def test_what_files_have_and_nothing_computes_with_is_ignored(tmp_path: Path) -> None:
    """Values to mix into the first layer, the shift of a gate that is not there, a tied head."""
    wanted, weights = (
        logits(load_checkpoint(write(tmp_path / "a", "normed"))),
        {
            **published(SHAPES["normed"]),
            MIX + "x_g": torch.ones(1, 1, 128),
            MIX + "v0": torch.ones(1, 1, 128),
            "lm_head.weight": torch.ones(320, 128),
        },
    )
    config = folder_config(SHAPES["normed"])
    folder = write_folder(tmp_path / "b", weights, config, tiny_tokenizer())
    assert torch.equal(logits(load_checkpoint(folder)), wanted)


def test_heads_of_the_donor_are_ignored(tmp_path: Path) -> None:
    config = load_checkpoint(write(tmp_path, num_attention_heads=14, num_key_value_heads=2)).config
    assert (config.num_attention_heads, config.head_dim) == (2, 64)


def test_divisor_gives_the_epsilon_of_the_group_norm(tmp_path: Path) -> None:
    config = load_checkpoint(write(tmp_path, "both", head_size_divisor=4)).config
    assert config == config.from_dict({**SHAPES["both"].config.to_dict(), "group_norm_eps": 16e-5})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"wkv_version": 6}, "rwkv_hybrid: wkv_version 6 is not supported, only 7"),
        ({"wkv_has_gate": True}, "wkv_has_gate is True, the weights lack g1"),
        ({"wkv_has_group_norm": True}, "wkv_has_group_norm is True, the weights lack ln_x"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
        ({"wkv_layers": [0, 2]}, r"wkv_layers \[0, 2\] is not supported"),
        ({"head_size": 32}, "head_size is 32, the weights have 64"),
        ({"intermediate_size": 8}, "intermediate_size is 8, the weights have 256"),
        ({"vocab_size": 300}, "vocab_size is 300, the weights have 320"),
        ({"num_wkv_heads": 4}, "num_wkv_heads is 4, the weights have 2"),
        ({"surprise": 1}, "rwkv_hybrid: unknown field 'surprise'"),
    ],
)
def test_config_that_asks_for_something_else_is_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(write(tmp_path, **fields))


def test_gate_that_the_config_denies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wkv_has_gate is False, the weights have g1"):
        load_checkpoint(write(tmp_path, "gated", wkv_has_gate=False))


def drop(key: str) -> Change:
    return lambda weights: weights.pop(key)


def put(key: str, *shape: int) -> Change:
    return lambda weights: weights.update({key: torch.ones(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("lm_head.weight"), r"lacks key 'lm_head.weight' \(1 in all\)"),
        (drop("model.embed_tokens.weight"), "lacks key 'model.embed_tokens.weight'"),
        (drop(MIX + "r_k"), f"lacks key '{MIX}r_k'"),
        (
            drop("model.layers.1.self_attn.time_mixer.v1"),
            "lacks key 'model.layers.1.self_attn.time_",
        ),
        (put(MIX + "g0", 128), f"unknown key '{MIX}g0'"),
        (put(MIX + "ln_x.bias", 128), f"unknown key '{MIX}ln_x.bias'"),
        (
            put("model.layers.0.self_attn.q_proj.weight", 4, 4),
            "unknown key .model.layers.0.self",
        ),
        (put("model.layers.1.mlp.up_proj.weight", 4, 128), r"up_proj.weight is \[4, 128\], wanted"),
    ],
)
def test_what_is_wrong_in_the_weights_is_named(
    tmp_path: Path, change: Change, message: str
) -> None:
    weights: Published = published(SHAPE)
    change(weights)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write_folder(tmp_path, weights, folder_config(SHAPE), tiny_tokenizer()))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("wkv.head_size", None, "arwkv7.wkv.head_size is missing"),
        ("block_count", 2, "arwkv7.block_count is 2, the tensors have 3"),
        ("embedding_length", 64, "arwkv7.embedding_length is 64, the tensors have 128"),
        ("feed_forward_length", 8, "arwkv7.feed_forward_length is 8, the tensors have 256"),
        ("attention.gate_lora_rank", 128, "gate_lora_rank 128 is not supported, only 0"),
        ("attention.decay_lora_rank", 8, "decay_lora_rank is 8, the tensors have 64"),
        ("token_shift_count", 2, "arwkv7.token_shift_count 2 is not supported, only 1"),
        ("surprise", 1, "unknown field 'arwkv7.surprise'"),
    ],
)
def test_metadata_that_says_something_else_is_refused(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    tensors = gguf_tensors(SHAPE, published(SHAPE))
    path = write_gguf(tmp_path / "model.gguf", SHAPE, tensors, FILL, change={key: value})
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(path)


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("output.weight"), "lacks key 'output.weight'"),
        (without("blk.1.ffn_up.weight"), "lacks key 'blk.1.ffn_up.weight'"),
        (
            lambda tensors: tensors.update(
                {"blk.0.time_mix_lerp_fused.weight": np.ones((6, 1, 1, 128), np.float32)}
            ),
            r"lerp_fused.weight is \[6, 128\], wanted \[5, 128\]",
        ),
    ],
)
def test_what_is_wrong_in_the_tensors_is_named(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    tensors = gguf_tensors(SHAPE, published(SHAPE))
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write_gguf(tmp_path / "model.gguf", SHAPE, tensors, FILL))


@pytest.mark.parametrize(
    "name", ["rwkv6qwen2", "rwkv7qwen2", "qwerky7", "any2rwkv_07", "HRWKV7", "radlads"]
)
def test_others_of_transformers_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} models are not supported: of RWKV models made"):
        load_checkpoint(write(tmp_path, model_type=name))


def test_tokenizer_and_turns_of_qwen_are_those_of_its_gguf(tmp_path: Path) -> None:
    plain = json.loads(tiny_tokenizer().content)["model"]
    names = [name for name, _ in sorted(plain["vocab"].items(), key=lambda item: item[1])]
    names += ["<|im_start|>", "<|im_end|>", *(f"[PAD{id}]" for id in range(302, 320))]
    types = [TokenType.NORMAL] * 300 + [TokenType.CONTROL] * 2 + [TokenType.UNUSED] * 18
    types[names.index("<|endoftext|>")] = TokenType.CONTROL

    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(names)
        writer.add_token_types(types)
        writer.add_token_merges([" ".join(merge) for merge in plain["merges"]])
        writer.add_eos_token_id(301)

    tensors = gguf_tensors(SHAPE, published(SHAPE))
    checkpoint = load_checkpoint(write_gguf(tmp_path / "model.gguf", SHAPE, tensors, fill))
    ends = {checkpoint.tokenizer.special_names[id] for id in checkpoint.tokenizer.eos_token_ids}
    assert ends == {"<|im_end|>", "<|endoftext|>"}
    assert checkpoint.chat_template.source == CHAT_ML
    assert checkpoint.config.eos_token_id == 301
