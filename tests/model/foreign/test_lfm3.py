"""LFM3 folders against transformers' own forward pass, and served natively."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Lfm3Config as TheirLfm3Config
from transformers import Lfm3ForCausalLM, PreTrainedModel

from model.checkpoint import CheckpointError, load_checkpoint
from model.config import ConfigError
from model.families.lfm3.config import Lfm3Config
from model.native.runtime import Runtime
from model.tokenizer import Tokenizer
from tests.hybrids import lfm3, randomise
from tests.model.foreign.conftest import tokens
from tests.model.foreign.test_gpt2 import edit_config
from tests.model.foreign.test_hybrids import ENDS, TOLERANCE, assert_rows, edit_weights

#: Of the numbers of the past, relative.
FLOAT16_STEP = 2.0**-10
UNTIED: dict[str, Any] = {
    "tied": False,
    "attention_layers": (0, 3),
    "window": 32,
    "num_key_value_heads": 6,
    "rotary_dim": 10,
    "conv_size": 4,
}
CONSTANT: dict[str, Any] = {
    "attention_layers": (),
    "window_layers": (0, 3),
    "context": 0,
    "window": 45,
    "head_gates": False,
    "post_norms": False,
}
SIZES: dict[str, dict[str, Any]] = {"odd": {}, "untied": UNTIED, "constant": CONSTANT}


def built(**changes: Any) -> PreTrainedModel:
    theirs = {**lfm3(vocab_size=310, **changes).theirs, **ENDS, "bos_token_id": 1}
    return Lfm3ForCausalLM(TheirLfm3Config(**theirs))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "theirs"


def save(model: PreTrainedModel, folder: Path, tokenizer: Tokenizer) -> Path:
    randomise(model, one_plus=False)
    model.eval().save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize("name", SIZES)
def test_logits_equal_transformers(name: str, folder: Path, tokenizer: Tokenizer) -> None:
    theirs = built(**SIZES[name])
    loaded, ids = load_checkpoint(save(theirs, folder, tokenizer)), tokens(70)
    found, wanted = loaded.model.parallel(ids), theirs(ids).logits
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert loaded.config.max_context == theirs.config.max_position_embeddings
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == (1, 0)
    assert loaded.config.constant_state == (name == "constant")
    assert_rows(loaded)


def test_what_a_config_leaves_out_is_as_published(folder: Path, tokenizer: Tokenizer) -> None:
    """The kinds of layers, the rotary positions and the sizes of heads of LFM3-1.7B."""
    sizes = {"vocab_size": 310, "hidden_size": 16, "intermediate_size": 24, "pad_token_id": 0}
    theirs = Lfm3ForCausalLM(TheirLfm3Config(**sizes, num_hidden_layers=7, **ENDS))
    save(theirs, folder, tokenizer)
    names = ("layer_types", "rope_parameters", "head_dim", "sliding_window", "conv_L_cache")
    flags = ("use_attention_gate", "use_sandwich_norm", "tie_word_embeddings")
    edit_config(folder, **dict.fromkeys((*names, *flags)))
    loaded, ids = load_checkpoint(folder), tokens(300)
    found, wanted = loaded.model.parallel(ids), theirs(ids).logits
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    config = loaded.config
    assert isinstance(config, Lfm3Config)
    assert (config.attention_layers, config.window_layers) == ((2, 6), (4,))
    assert (config.head_dim, config.window, config.conv_size) == (128, 256, 7)
    assert (config.rope_theta, config.rotary_dim) == (1e6, 64)
    assert (config.window_rope_theta, config.window_rotary_dim) == (1e4, 128)


@pytest.mark.parametrize("name", SIZES)
def test_native_runtime_writes_the_tokens_of_transformers(
    name: str, folder: Path, tokenizer: Tokenizer
) -> None:
    """A prompt in three cuts, and 300 greedy tokens, but for those that come out even.

    The past is float16 here, so that of two logits which lie that close the other may be larger.
    """
    theirs = built(**SIZES[name])
    loaded, prompt = load_checkpoint(save(theirs, folder, tokenizer)), tokens(37)[:1]
    runtime = Runtime(loaded.config, loaded.weights, "float32")
    pool, draw, ids = runtime.empty_pool(1), runtime.draw(temperature=0.0), prompt[0].tolist()
    runtime.run(pool, [0], [0], [ids[:1]], [None])
    runtime.run(pool, [0], [1], [ids[1:24]], [None])
    ((found,),) = runtime.run(pool, [0], [24], [ids[24:]], [draw])
    answer, wanted, num_even = theirs(prompt, use_cache=True), [], 0
    for position in range(37, 337):
        logits = answer.logits[0, -1]
        wanted.append(int(logits.argmax()))
        if found != wanted[-1]:
            num_even += 1
            assert logits[found] > logits.max() - 2 * FLOAT16_STEP * logits.abs().max()
        last, past = torch.tensor([wanted[-1:]]), answer.past_key_values
        answer = theirs(last, past_key_values=past, use_cache=True)
        ((found,),) = runtime.run(pool, [0], [position], [wanted[-1:]], [draw])
    assert num_even <= 3
    assert len(set(wanted)) > 20  # not one token again and again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_bias": True}, "conv_bias True"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"use_attention_gate": 1}, "use_attention_gate must be a boolean, not 1"),
        ({"num_experts": 8}, "unknown field 'num_experts'"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer, not 0"),
        ({"layer_types": ["conv"] * 3}, "layer_types has 3 of 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "must be a list of 'conv' and 'sliding_att"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object, not \[1\]"),
        ({"rope_parameters": {}}, "rope_parameters.sliding_attention must be an object, not None"),
    ],
)
def test_config_beyond_ours_is_refused_by_name(
    folder: Path, tokenizer: Tokenizer, changes: dict[str, Any], message: str
) -> None:
    edit_config(save(built(), folder, tokenizer), **changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_type": "yarn"}, "full_attention: rope_type 'yarn' is not supported, only"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported, only 1.0"),
        ({"rope_type": "proportional", "partial_rotary_factor": 2.0}, "must be in 0..1, not 2.0"),
        ({"rope_type": "proportional", "factor": 2.0}, "factor 2.0 is not supported, only 1.0"),
        ({"rope_theta": "1"}, "full_attention: rope_theta must be a number, not '1'"),
        ({"beta_fast": 2.0}, "full_attention: unknown field 'beta_fast'"),
    ],
)
def test_rotary_positions_beyond_ours_are_refused_by_name(
    folder: Path, tokenizer: Tokenizer, values: dict[str, Any], message: str
) -> None:
    full = {"rope_type": "default", "rope_theta": 1e4, **values}
    kinds = {"full_attention": full, "sliding_attention": {"rope_theta": 1e4}}
    edit_config(save(built(), folder, tokenizer), rope_parameters=kinds)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)
    edit_config(folder, rope_parameters={**kinds, "full_attention": {}, "conv": {}})
    with pytest.raises(ConfigError, match=r"lfm3: unknown field rope_parameters\.conv"):
        load_checkpoint(folder)


def test_gate_by_its_name_in_transformers_is_read(folder: Path, tokenizer: Tokenizer) -> None:
    save(built(), folder, tokenizer)
    wanted = load_checkpoint(folder).model.parallel(tokens(10))

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if ".self_attn.gate_proj." in key]:
            tensors[key.replace("gate_proj", "g_proj")] = tensors.pop(key)

    edit_weights(folder, rename)
    assert torch.equal(load_checkpoint(folder).model.parallel(tokens(10)), wanted)


def test_missing_and_unknown_keys_are_named(folder: Path, tokenizer: Tokenizer) -> None:
    save(built(), folder, tokenizer)
    key = "model.layers.1.self_attn.gate_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update(side=tensors.pop(key)))
    with pytest.raises(CheckpointError, match=rf"lacks key '{key}'"):
        load_checkpoint(folder)
    edit_weights(folder, lambda tensors: tensors.update({key: tensors["side"].clone()}))
    with pytest.raises(CheckpointError, match="unknown key 'side'"):
        load_checkpoint(folder)
