"""Models with attention in GGUF: the model of transformers, and what llama.cpp computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from model.architectures.network import model_of
from model.checkpoint import load_checkpoint
from model.config import ConfigError
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.qwen35.config import Qwen35Config
from model.families.qwen35.read import HeadOrder
from model.foreign import read_gguf
from model.weights import CheckpointError, StoredWeights
from model.weights.gguf_file import GgufFile
from tests.gguf_blocks import numbers_of, random_blocks
from tests.gguf_files import Tensors, byte_level_vocabulary, finish
from tests.hybrid_gguf import hybrid_tensors, numbered_vocabulary, write_hybrid
from tests.hybrids import HYBRIDS, ours, texts
from tests.model.architectures.rwkv7_llama import llama_logprobs
from tests.tiny import tiny_tokenizer

#: Of logarithms of probabilities down to -12: llama.cpp adds up in other orders, and approximates
#: exponentials, which is seen more in one of the models than in the others.
LLAMA_TOLERANCE = 2e-4
TRIPLE_TOLERANCE = 0.01
#: llama.cpp also rounds activations to the format of the weights: relative to the deviation.
ROUNDED_TOLERANCE = {"BF16": 0.05, "Q8_0": 0.15}
#: With sizes that llama.cpp takes (keys and values of one width, whole blocks of Q8_0), and the
#: length of a prompt after which no two ids come so near that rounding decides.
SERVED = {"qwen35-wide": 44, "qwen35-triple": 42, "lfm2-wide": 36}
SERVED |= {"granite-wide": 44, "granite3-wide": 44, "nemotron-wide": 44, "falcon-wide": 44}
SERVED |= {"jamba-wide": 44, "llama-wide": 44, "qwen2-wide": 44, "qwen3-wide": 44}
#: In whose files some weights are those of the folder times its multipliers.
MULTIPLIED = [name for name, hybrid in HYBRIDS.items() if hybrid.family == "falcon_h1"]
#: Of which llama.cpp has files with the folder's own numbers: of LFM3 it has none.
ALIKE = [name for name in HYBRIDS if name not in MULTIPLIED and HYBRIDS[name].family != "lfm3"]
QWEN, LFM2, GRANITE, JAMBA = "qwen35-triple", "lfm2-wide", "granite-wide", "jamba-wide"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def load(path: Path) -> StoredWeights:
    _, weights = read_gguf(GgufFile(path), path.name)
    return weights


def test_blocks_come_in_the_order_of_the_heads(path: Path) -> None:
    """Those of rows; where columns are heads there are none."""
    config = HYBRIDS[QWEN].config
    assert isinstance(config, Qwen35Config)
    values = config.num_value_heads * config.value_head_dim
    rows = {
        "attn_qkv": 2 * config.num_key_heads * config.key_head_dim + values,
        "attn_gate": values,
        "ffn_up": values,
        "ssm_alpha": config.num_value_heads,
        "ssm_out": 8,
    }
    writer = GGUFWriter(path, "qwen35")
    for seed, (name, num) in enumerate(rows.items()):
        blocks = random_blocks("Q4_K", num, 256, seed)
        kind = GGMLQuantizationType.Q4_K
        writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=kind)
    finish(writer)
    weights = HeadOrder(GgufFile(path), config)
    for name in ("attn_qkv", "attn_gate", "ffn_up"):
        key = f"blk.0.{name}.weight"
        assert weights.block_kind(key) == "Q4_K"
        for begin, end in ((0, None), (3, 8), (values - 3, values)):
            found = numbers_of("Q4_K", weights.blocks(key, begin, end))
            assert np.array_equal(found, weights.rows(key, begin, end))
    assert weights.block_kind("blk.0.ssm_alpha.weight") is None
    assert weights.block_kind("blk.0.ssm_out.weight") is None


@pytest.mark.parametrize("name", ALIKE)
def test_file_is_the_model_of_the_folder(name: str, path: Path) -> None:
    """Bit for bit, but for norms that are stored less one and the logarithm of the decay."""
    config, weights = read_gguf(GgufFile(write_hybrid(path, name)), path.name)
    wanted = HYBRIDS[name].config
    different = {"norm_eps", "rope_theta", "rope_factors", "context"}
    different |= {"embedding_scale", "residual_scale", "attention_scale"}
    found = {key: value for key, value in config.to_dict().items() if key not in different}
    assert found.items() <= wanted.to_dict().items()
    for field in different - {"context"}:
        found, expected = getattr(config, field, ()), getattr(wanted, field, ())
        assert found == pytest.approx(expected, rel=1e-6)
    for key, tensor in ours(name).state_dict().items():
        np.testing.assert_allclose(weights[key], tensor.numpy(), rtol=0, atol=5e-7, err_msg=key)


@pytest.mark.parametrize("name", ["falcon-normed", "falcon-wide"])
def test_file_with_multiplied_weights_is_the_model_of_the_folder(name: str, path: Path) -> None:
    tokens = texts(name, 40)
    found = model_of(*read_gguf(GgufFile(write_hybrid(path, name)), path.name)).parallel(tokens)
    wanted = ours(name).parallel(tokens)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    "name",
    ["qwen35-unequal", "qwen35-triple", "qwen35-equal", "lfm2-odd", "granite-odd", "jamba-odd"],
)
def test_rows_are_those_of_the_whole(name: str, path: Path) -> None:
    weights = load(write_hybrid(path, name))
    for key in weights:
        whole = weights[key]
        for begin, end in ((0, 0), (0, 1), (1, 14), (5, None), (0, len(whole)), (len(whole), None)):
            assert np.array_equal(weights.rows(key, begin, end), whole[begin:end]), key


@pytest.mark.package
@pytest.mark.parametrize("name", SERVED)
def test_logits_and_300_greedy_tokens_equal_llama_cpp(name: str, path: Path) -> None:
    found, wanted, tokens = compared(name, path, "F32", 300)
    assert found[:, 1:].argmax(dim=-1).add(1).tolist() == tokens  # it was told not to end: id 0
    assert len(set(tokens)) > 20  # not one token again and again
    tolerance = TRIPLE_TOLERANCE if name == "qwen35-triple" else LLAMA_TOLERANCE
    assert (found - wanted).abs().max() < tolerance


@pytest.mark.package
@pytest.mark.parametrize("kind", ROUNDED_TOLERANCE)
@pytest.mark.parametrize("name", SERVED)
def test_lower_precisions_are_near_llama_cpp(name: str, kind: str, path: Path) -> None:
    found, wanted, _ = compared(name, path, kind, 60)
    error = (found - wanted).square().mean().sqrt() / wanted.std()
    assert error < ROUNDED_TOLERANCE[kind]


def compared(
    name: str, path: Path, kind: str, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Logarithms of probabilities at llama.cpp's greedy tokens: ours, llama.cpp's; the tokens."""
    size, prompt = HYBRIDS[name].config.vocab_size, texts(name, SERVED[name], batch=1)
    write_hybrid(path, name, kind, numbered_vocabulary(size))
    tokens, rows = llama_logprobs(path, prompt[0].tolist(), num_tokens, size)
    model = model_of(*read_gguf(GgufFile(path), path.name))
    text = torch.cat([prompt, torch.tensor([tokens])], dim=1)
    found = model.parallel(text)[0, prompt.shape[1] - 1 : -1].log_softmax(dim=-1)
    return found, torch.tensor(rows), tokens


def test_blocks_that_predict_several_tokens_are_left_out(path: Path) -> None:
    more = {"blk.4.nextn.enorm.weight": np.ones(32, np.float32)}
    more["blk.4.attn_norm.weight"] = np.ones(32, np.float32)
    change = {"block_count": 5, "nextn_predict_layers": 1}
    write_hybrid(path, QWEN, change=change, tensors=hybrid_tensors(QWEN) | more)
    config, _ = read_gguf(GgufFile(path), path.name)
    assert config.num_hidden_layers == 4


@pytest.mark.parametrize(
    "change",
    [
        {"full_attention_interval": None, "attention.recurrent_layers": [True] * 3 + [False]},
        {"attention.head_count_kv": [0, 0, 0, 2]},
        {"vocab_size": 330},
        {"full_attention_interval": None, "rope.dimension_sections": None},
    ],
    ids=str,
)
def test_other_ways_to_say_the_same_are_read(path: Path, change: dict[str, Any]) -> None:
    wanted, _ = read_gguf(GgufFile(write_hybrid(path, QWEN)), path.name)
    found, _ = read_gguf(GgufFile(write_hybrid(path, QWEN, change=change)), path.name)
    assert found == wanted


def test_granite_without_mamba_may_have_what_the_converter_says_of_it(path: Path) -> None:
    """As of the 4.0 without "H", whose config is that of a hybrid."""
    wanted, _ = read_gguf(GgufFile(write_hybrid(path, "granite3-wide")), path.name)
    names = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
    change: dict[str, Any] = {f"ssm.{name}": 4 for name in names}
    change |= {"attention.head_count_kv": [2, 2, 2], "rope.scaling.finetuned": True}
    change |= {"expert_shared_feed_forward_length": 96}
    found, _ = read_gguf(GgufFile(write_hybrid(path, "granite3-wide", change=change)), path.name)
    assert found == wanted


def test_nemotron_may_have_one_epsilon(path: Path) -> None:
    change = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 2e-6}
    config, _ = read_gguf(GgufFile(write_hybrid(path, "nemotron-odd", change=change)), path.name)
    assert isinstance(config, Mamba2HybridConfig)
    assert config.norm_eps == pytest.approx(2e-6)


def test_text_begins_with_what_separates_texts(path: Path) -> None:
    """Files of Qwen3.5 name no start of text, and fill up batches with the end of a document."""

    def fill(writer: Any) -> None:
        writer.add_tokenizer_model("no_vocab")
        writer.add_eos_token_id(5)
        writer.add_pad_token_id(3)

    config, _ = read_gguf(GgufFile(write_hybrid(path, QWEN, fill=fill)), path.name)
    assert (config.bos_token_id, config.eos_token_id) == (3, 5)


def test_file_is_served_with_the_tokenizer_inside(path: Path) -> None:
    for name in (QWEN, LFM2, GRANITE, JAMBA):
        write_hybrid(path, name, fill=byte_level_vocabulary(tiny_tokenizer(), 330))
        checkpoint = load_checkpoint(path)
        assert checkpoint.config.attention in ("qwen35", "lfm2", "mamba2_hybrid", "jamba")
        assert checkpoint.tokenizer.encode("Once upon") == tiny_tokenizer().encode("Once upon")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (QWEN, {"block_count": None}, "block_count is missing"),
        (QWEN, {"block_count": 9999}, "keys, too few for 9999 layers"),
        (QWEN, {"nextn_predict_layers": 4}, "nextn_predict_layers must be less than 4, not 4"),
        (QWEN, {"embedding_length": 33}, "embedding_length is 33, the tensors have 32"),
        (QWEN, {"attention.value_length": 32}, "attention.value_length is 32, not 64"),
        (QWEN, {"attention.head_count_kv": [2, 2]}, "head_count_kv must be a number or one for"),
        (QWEN, {"attention.head_count_kv": [2, 2, 2, 0]}, "head_count_kv differs among layers"),
        (QWEN, {"attention.recurrent_layers": "all"}, "recurrent_layers must be a number or one"),
        (QWEN, {"rope.dimension_sections": 8}, "rope.dimension_sections must be an array"),
        (QWEN, {"rope.scaling.type": "yarn"}, r"unknown field 'rope\.scaling\.type'"),
        (QWEN, {"expert_count": 8}, "unknown field 'expert_count'"),
        (QWEN, {"ssm.group_count": 4}, "num_key_heads must divide 6, not 4"),
        (LFM2, {"attention.sliding_window": 8}, "attention.sliding_window is not supported: it"),
        (LFM2, {"attention.head_count_kv": [0, 0, 2, 0, 0, 4]}, "head_count_kv differs among"),
        (LFM2, {"attention.head_count_kv": 2.5}, "head_count_kv must be a number or one for"),
        (LFM2, {"rope.dimension_count": 8}, "rope.dimension_count is 8, the tensors have 16"),
        (LFM2, {"expert_count": 8}, "unknown field 'expert_count'"),
        (LFM2, {"shortconv.l_cache": 5}, r"shortconv\.conv\.weight is \[64, 3\], wanted \[64, 5\]"),
        (GRANITE, {"expert_count": 8}, "expert_count is not supported: only the dense ones of"),
        (GRANITE, {"ssm.time_step_rank": 9}, r"ssm\.time_step_rank must divide 128, not 9"),
        (GRANITE, {"logit_scale": 0.0}, r"logit_scale must be positive, not 0\.0"),
        (GRANITE, {"rope.dimension_count": 8}, "rope.dimension_count is 8, the tensors have 16"),
        (GRANITE, {"rope.scaling.finetuned": 2}, "rope.scaling.finetuned must be a boolean, not 2"),
        (GRANITE, {"rope.scaling.type": "yarn"}, r"unknown field 'rope\.scaling\.type'"),
        (GRANITE, {"ssm.group_count": 3}, "num_groups must divide 8 heads, not 3"),
        (JAMBA, {"expert_count": 16}, "expert_count is not supported: only the dense ones of"),
        (JAMBA, {"ssm.inner_size": None}, r"ssm\.inner_size is missing"),
        (JAMBA, {"ssm.dt_b_c_rms": True}, r"unknown field 'ssm\.dt_b_c_rms'"),
        (JAMBA, {"ssm.state_size": 15}, r"ssm_x\.weight is \[64, 128\], wanted \[62, 128\]"),
        ("granite3-wide", {"attention.head_count_kv": [2, 0, 2]}, "must not be 0 in any layer"),
        ("llama-wide", {"attention.head_count_kv": [3, 3, 0, 3]}, "must not be 0 in any layer"),
        ("granite3-wide", {"ssm.dt_b_c_rms": True}, r"unknown field 'ssm\.dt_b_c_rms'"),
        ("nemotron-odd", {"feed_forward_length": 37}, "feed_forward_length must be one number in"),
        ("nemotron-odd", {"feed_forward_length": [0, 37, 0, 0, 38]}, "must be one number in some"),
        ("nemotron-odd", {"rope.scaling.finetuned": True}, "finetuned True is not supported"),
        ("falcon-odd", {"attention.head_count_kv": [2, 0, 2]}, "must not be 0 in any layer"),
        ("falcon-odd", {"logit_scale": 2.0}, "unknown field 'logit_scale'"),
        (
            "falcon-odd",
            {"rope.dimension_count": 4},
            "rope.dimension_count is 4, the tensors have 6",
        ),
    ],
)
def test_metadata_beyond_ours_is_refused_by_name(
    name: str, change: dict[str, Any], message: str, path: Path
) -> None:
    write_hybrid(path, name, change=change)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load(path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (QWEN, lambda t: t.pop("blk.1.ssm_a"), r"lacks key 'blk\.1\.ssm_a'"),
        (QWEN, lambda t: t.pop("token_embd.weight"), "token_embd.weight is missing, or no matrix"),
        (QWEN, lambda t: t.update(side=np.ones(3, np.float32)), "an unknown key 'side'"),
        (LFM2, lambda t: t.pop("token_embd_norm.weight"), r"lacks key 'token_embd_norm\.weight'"),
        (LFM2, lambda t: t.update(side=np.ones(3, np.float32)), "an unknown key 'side'"),
        (JAMBA, lambda t: t.pop("blk.0.ssm_b_norm.weight"), r"lacks key 'blk\.0\.ssm_b_norm\.w"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, change: Callable[[Tensors], object], message: str, path: Path
) -> None:
    tensors = dict(_tensors(name))
    change(tensors)
    write_hybrid(path, name, tensors=tensors)
    with pytest.raises(CheckpointError, match=message):
        load(path)


@cache
def _tensors(name: str) -> Tensors:
    return hybrid_tensors(name)
