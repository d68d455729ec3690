"""What is read and written: the source in GGUF, and the adapter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM

from model.convert.linearize.chats import CHAT_ML, LLAMA3, chat_format
from model.convert.linearize.plan import LlamaShape, Plan, plan_from_json, smollm2_plan, window_plan
from model.convert.linearize.result import Adapter, load_adapter, save_adapter
from model.convert.linearize.source import Llama, read_source
from model.convert.linearize.student import LORA_SCALE, Student
from model.families.llama.config import LayerPlan
from model.files import ConfigError
from model.hub.base import file_digest
from model.tokenization.gguf import CUTS
from model.weights import CheckpointError
from tests.gguf_files import byte_level_vocabulary, finish
from tests.model.convert.linearize.tiny import PLAN, SHAPE, tiny_ids, tiny_llama, tiny_tokenizer

#: That of SmolLM2, as far as its text tells the format.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a tiny model<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
)
SMOLLM2 = LlamaShape(49152, 576, 30, 9, 3, 64, 1536, 100_000.0, 1e-5)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter turns the rows of q and k (`LlamaModel.permute`)."""
    rows = weight.shape[0] // heads // 2
    return weight.view(heads, 2, rows, -1).swapaxes(1, 2).reshape(weight.shape)


def write_llama(path: Path, model: Llama, family: str = "llama") -> Path:
    shape = model.shape
    writer = GGUFWriter(path, family)
    sizes = {
        "context_length": 4096,
        "embedding_length": shape.hidden_size,
        "block_count": shape.num_layers,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.key_length": shape.head_dim,
    }
    for key, value in sizes.items():
        writer.add_uint32(f"{family}.{key}", value)
    writer.add_float32(f"{family}.rope.freq_base", shape.rope_theta)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", shape.rms_norm_eps)
    byte_level_vocabulary(tiny_tokenizer(), shape.vocab_size)(writer)
    writer.add_chat_template(TEMPLATE)
    tensors = {"token_embd": model.embedding, "output_norm": model.norm}
    for index in range(shape.num_layers):
        layer = model.layer(index)
        sizes_of_rows = [heads * shape.head_dim for heads in (6, 2, 2)]
        q, k, v = layer.qkv.split(sizes_of_rows)
        gate, value = layer.up.chunk(2)
        block = {
            "attn_q": interleaved(q, shape.num_heads),
            "attn_k": interleaved(k, shape.num_kv_heads),
            "attn_v": v,
            "attn_output": layer.out,
            "attn_norm": layer.attention_norm,
            "ffn_norm": layer.mlp_norm,
            "ffn_gate": gate,
            "ffn_up": value,
            "ffn_down": layer.down,
        }
        tensors |= {f"blk.{index}.{name}": tensor for name, tensor in block.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(tensor.detach().numpy()))
    finish(writer)
    return path


def test_source_is_read_as_it_was_before_its_file(tmp_path: Path) -> None:
    model, path = tiny_llama(), tmp_path / "tiny.gguf"
    source = read_source(write_llama(path, model))
    assert source.model.shape == SHAPE
    ids = tiny_ids(20)
    assert torch.equal(source.model.hidden(ids), model.hidden(ids))
    assert not any(parameter.requires_grad for parameter in source.model.parameters())
    assert source.digest == file_digest(path)
    assert source.chat is not None
    system = "<|im_start|>system\nYou are a tiny model<|im_end|>\n"
    assert source.chat == replace(CHAT_ML, system=system)


SIZES = {"vocab_size": 260, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "original_max_position_embeddings": 16,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        (
            "llama",
            {"rope_parameters": SCALED},
        ),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_folder_gives_the_numbers_of_transformers(
    tmp_path: Path, family: str, more: dict[str, object]
) -> None:
    config = AutoConfig.for_model(family, **SIZES, **HEADS, **more)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.5)
        else:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
    theirs.save_pretrained(tmp_path)
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    source = read_source(tmp_path)
    ids = tiny_ids(40)
    found = source.model.hidden(ids) @ source.model.head.t()
    with torch.no_grad():
        wanted = theirs(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert source.chat is None


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("llama", {"attention_bias": True}, "out_bias True is not supported here"),
        ("smollm3", {}, r"unrotated_layers \(3,\) is not supported here"),
    ],
)
def test_options_beyond_the_conversion_are_refused_by_name(
    tmp_path: Path, family: str, more: dict[str, object], message: str
) -> None:
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = SIZES | {"num_hidden_layers": 4} | ids
    config = AutoConfig.for_model(family, **sizes, **HEADS, **more)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=message):
        read_source(tmp_path)


def test_another_family_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"of the family 'delta'.*is for llama, qwen2 and qwen3"):
        read_source("everstream-stories")


def test_formats_of_chats_are_told_by_their_template() -> None:
    tokenizer = tiny_tokenizer()
    assert chat_format(TEMPLATE.replace("system\\nYou", "system\nYou"), tokenizer) == chat_format(
        TEMPLATE, tokenizer
    )
    assert chat_format("{{ '<|im_start|>' + message.role }}", tokenizer) == CHAT_ML
    llama3 = "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    assert chat_format(llama3, tokenizer) is None  # the tokenizer lacks its tokens
    assert chat_format("{{ message.content }}", tokenizer) is None
    assert LLAMA3.turn("user", "Hi") == ("<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>")


def test_smollm_cuts_numbers_into_digits() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    backend = Backend(models.BPE())
    CUTS["smollm"].apply(backend)
    words = backend.pre_tokenizer.pre_tokenize_str("In 1999, it's 3km")
    assert [word for word, _ in words] == [
        *("In", "Ġ", "1", "9", "9", "9", ",", "Ġit", "'s", "Ġ", "3", "km"),
    ]


def test_adapter_comes_back_whole(tmp_path: Path) -> None:
    source, path = tiny_llama(), tmp_path / "adapter.safetensors"
    student = Student(source, PLAN, {"qkv": 2}, 16)
    student.init_weights(torch.Generator().manual_seed(3))
    adapter = Adapter("abc", PLAN, {"qkv": 2}, 16, dict(student.state_dict()), {"step": 7})
    save_adapter(path, adapter)
    loaded = load_adapter(path)
    assert (loaded.base, loaded.plan, loaded.ranks, loaded.notes) == (
        *("abc", PLAN, {"qkv": 2}),
        {"step": 7},
    )
    ids = tiny_ids(40)
    assert torch.equal(loaded.student(source).hidden(ids), student.hidden(ids))


def test_adapter_without_the_distance_of_first_tokens_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = {"plan": PLAN.to_json(), "lora_scale": LORA_SCALE, "base": "", "ranks": {}}
    path = tmp_path / "adapter.safetensors"
    save_file({"a": torch.zeros(1)}, path, {"linearize": json.dumps({**values, "notes": {}})})
    with pytest.raises(CheckpointError, match="is of an older version"):
        load_adapter(path)


def test_file_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="not an adapter"):
        load_adapter(tmp_path / "other.safetensors")


def test_plan_comes_back_from_json() -> None:
    for plan in (PLAN, smollm2_plan("6mb")):
        assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_plans_of_smollm2_fit_their_bytes() -> None:
    assert smollm2_plan("6mb").state_bytes(SMOLLM2) == 5_979_648
    assert smollm2_plan("3mb").state_bytes(SMOLLM2) == 2_966_784
    # The control has no less than the plan that it is compared with, and fits as well.
    assert window_plan(30, 256).state_bytes(SMOLLM2) == 5_990_400


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, "window must be 1 or more"),
        ({"window": 4, "far": "other"}, "far must be one of"),
        ({"window": 4, "far": "relative"}, "cannot have 0 features"),
        ({"window": 4, "features": 8}, "cannot have 8 features"),
    ],
)
def test_layer_that_cannot_be_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerPlan(**values)  # type: ignore[arg-type]


def test_plan_counts_the_bytes_of_each_part() -> None:
    plan = Plan((LayerPlan(10), LayerPlan(10, "relative", 4), LayerPlan(10, "delta", 4)), sinks=2)
    heads, width = SHAPE.num_kv_heads, SHAPE.head_dim
    exact = 3 * heads * 12 * 2 * width * 2
    assert plan.state_bytes(SHAPE) == exact + heads * 4 * (width + 1) * 4 + heads * 4 * width * 4
