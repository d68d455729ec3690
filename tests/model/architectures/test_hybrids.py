"""Models with attention equal transformers in every form, for any split of a text."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.architectures import config_from_dict
from model.architectures.decoder import Decoder
from model.architectures.hybrid import with_past
from model.architectures.network import ModelState, model_of
from model.bounds import Bound, bounded
from model.checkpoint import Checkpoint
from model.families.jamba.config import JambaConfig
from model.families.lfm2.config import Lfm2Config
from model.families.llama.config import LayerPlan, LlamaConfig
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.qwen35.config import Qwen35Config
from model.files import ConfigError
from model.foreign.weights import Renamed
from tests.hybrids import HYBRIDS, ours, texts, theirs
from tests.model.architectures.forms import (
    assert_bfloat16_is_near,
    assert_gradients_agree,
    chunk,
    steps,
)
from tests.model.attention.test_contract import assert_close, random_split
from tests.tiny import tiny_tokenizer

#: Of float32 sums over the depth of the models, which transformers adds up in another order.
TOLERANCE = 1e-4
#: Half a unit in the last place of bfloat16, over the depth of the model and its gates.
BFLOAT16_TOLERANCE = 0.2


@pytest.fixture(params=HYBRIDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str) -> Decoder:
    return ours(name)


def test_logits_and_states_equal_transformers(model: Decoder, name: str) -> None:
    tokens = texts(name, 70)
    wanted = theirs(name)(tokens, use_cache=True)
    assert_close(model.parallel(tokens), wanted.logits.double(), TOLERANCE)
    for form in (chunk, steps):
        logits, state = form(model, tokens)
        assert_close(logits, wanted.logits.double(), TOLERANCE)
        windows = getattr(model.config, "window_layers", ())
        for i, (found, layer) in enumerate(zip(state, wanted.past_key_values.layers, strict=True)):
            window = model.config.window if i in windows else 0
            assert_close_states(found, their_state(layer, found, name), window)


def their_state(layer: Any, found: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """A layer's state as we keep it; their convolution's has one input more."""
    state: dict[str, Tensor] = {}
    if "k" in found:
        state = {"k": layer.keys.transpose(1, 2), "v": layer.values.transpose(1, 2)}
    if "conv" not in found:
        return state
    state |= {"conv": layer.conv_states[0][..., -found["conv"].shape[1] :].transpose(1, 2)}
    if "S" in found:
        sums = layer.recurrent_states[0]
        is_mamba = isinstance(HYBRIDS[name].config, Mamba2HybridConfig | JambaConfig)
        state["S"] = sums.transpose(-1, -2) if is_mamba else sums
    return state


def assert_close_states(
    found: dict[str, Tensor], wanted: dict[str, Tensor], window: int = 0
) -> None:
    """A position has its place in a ring of ``window``; theirs lacks what the next token ends."""
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        rows = found[key]
        if key in "kv":
            rows = rows.transpose(-1, -2) if key == "k" else rows
            rows = rows.transpose(2, 3).flatten(1, 2)
            places = torch.arange(70 - tensor.shape[1], 70)
            places = places % window if window else places
            assert not rows[:, window or tensor.shape[1] :].any()
            rows = rows[:, places]
        assert_close(rows, tensor.double(), TOLERANCE)


@pytest.mark.slow
def test_greedy_tokens_equal_transformers(model: Decoder, name: str) -> None:
    prompt = texts(name, 30, batch=1)
    answer = theirs(name)(prompt, use_cache=True)
    wanted: list[int] = []
    for _ in range(300):
        wanted.append(int(answer.logits[0, -1].argmax()))
        answer = theirs(name)(
            torch.tensor([wanted[-1:]]), past_key_values=answer.past_key_values, use_cache=True
        )
    found: list[int] = []
    logits, state = chunk(model, prompt)
    last = logits[:, -1]
    for index in range(300):
        found.append(int(last.argmax()))
        last, state = model.step(torch.tensor(found[-1:]), state, torch.tensor([30 + index]))
    assert found == wanted
    assert len(set(found)) > 20  # not one token again and again
    assert_close(last, answer.logits[:, -1].double(), TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_equals_the_steps(model: Decoder, name: str, seed: int) -> None:
    tokens = texts(name, 150)
    wanted, wanted_state = steps(model, tokens)
    logits, state = chunk(model, tokens, random_split(150, seed))
    assert_close(logits, wanted.double(), TOLERANCE)
    assert_same(state, wanted_state)


def test_rows_do_not_mix(model: Decoder, name: str) -> None:
    """Nor does it matter that they have come to other positions."""
    tokens = texts(name, 40)
    _, first = chunk(model, tokens[:, :17])
    _, second = chunk(model, tokens[:, :30])
    mixed = tuple(
        {key: torch.stack([a[key][0], b[key][1]]) for key in a}
        for a, b in zip(first, second, strict=True)
    )
    new = torch.stack([tokens[0, 17:27], tokens[1, 30:40]])
    logits, _ = model.chunk(new, mixed, torch.tensor([17, 30]))
    assert_close(logits[0], chunk(model, tokens[:1, :27])[0][0, 17:].double(), TOLERANCE)
    assert_close(logits[1], chunk(model, tokens[1:])[0][0, 30:].double(), TOLERANCE)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65])
def test_future_never_changes_the_past(model: Decoder, name: str, length: int) -> None:
    """Not even in rounding."""
    tokens = texts(name, 80)
    changed = tokens.clone()
    changed[:, length:] = (changed[:, length:] + 1) % model.config.vocab_size
    first, second = (chunk(model, each)[0] for each in (tokens, changed))
    assert torch.equal(first[:, :length], second[:, :length])
    assert not torch.equal(first[:, length], second[:, length])


def test_arguments_are_not_changed(model: Decoder, name: str) -> None:
    tokens = texts(name, 20)
    _, state = chunk(model, tokens)
    before = copy.deepcopy(state)
    model.chunk(tokens, state, torch.full((2,), 20))
    model.step(tokens[:, 0], state, torch.full((2,), 20))
    for layer, wanted in zip(state, before, strict=True):
        assert all(torch.equal(layer[key], tensor) for key, tensor in wanted.items())


def test_gradients_of_the_forms_agree(model: Decoder, name: str) -> None:
    assert_gradients_agree(model, texts(name, 24), 1e-3)


def test_bfloat16_is_near_float32_and_keeps_its_state_wide(model: Decoder, name: str) -> None:
    assert_bfloat16_is_near(model, texts(name, 40), BFLOAT16_TOLERANCE)


@pytest.mark.parametrize(
    "name", [name for name, hybrid in HYBRIDS.items() if not hybrid.config.constant_state]
)
def test_sliding_model_goes_on_for_any_split(name: str) -> None:
    hybrid = HYBRIDS[name]
    config = with_past(hybrid.config, 48, "slide")
    arrays = {key: tensor.numpy() for key, tensor in theirs(name).state_dict().items()}
    model = model_of(config, Renamed(arrays, hybrid.names.parts_of(hybrid.config)))
    assert isinstance(model, Decoder)
    tokens = texts(name, 150)
    wanted, wanted_state = steps(model, tokens)
    for seed in range(3):
        logits, state = chunk(model, tokens, random_split(150, seed))
        assert_close(logits, wanted.double(), TOLERANCE)
        assert_same(state, wanted_state)
    logits, _ = chunk(ours(name), tokens)
    assert_close(wanted[:, :48], logits[:, :48].double(), TOLERANCE)
    assert not torch.allclose(wanted[:, 100:], logits[:, 100:], atol=0.01)


def test_config_survives_its_json_form(name: str) -> None:
    config = HYBRIDS[name].config
    assert config_from_dict(config.to_dict()) == config
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("cls", [Qwen35Config, Lfm2Config, Mamba2HybridConfig, JambaConfig])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention_layers": "03"}, "attention_layers must be a list of integers"),
        ({"attention_layers": [3, 1]}, r"attention_layers must be in 0\.\.15 and in order"),
        ({"attention_layers": [1, 1]}, r"attention_layers must be in 0\.\.15 and in order"),
        ({"attention_layers": [16]}, r"attention_layers must be in 0\.\.15 and in order"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must divide 16, not 3"),
        ({"context": 40}, "context must be a multiple of 16"),
        ({"context": True}, "context must be a multiple of 16"),
        ({"past": "grow"}, "past must be 'stop' or 'slide'"),
        ({"conv_size": 1}, r"conv_size must be in 2\.\.64"),
        ({"rope_theta": 1}, "rope_theta must be a float above 1"),
        ({"tied": 1}, "tied must be a boolean"),
        ({"norm_eps": 0.0}, "norm_eps must be in"),
        ({"max_context": 0}, "max_context must be a positive integer"),
        ({"eos_token_id": 99}, "eos_token_id must be in"),
        ({"heads": 1}, "unknown field 'heads'"),
    ],
)
def test_config_names_the_field(
    cls: type[Qwen35Config | Lfm2Config | Mamba2HybridConfig | JambaConfig],
    values: dict[str, Any],
    message: str,
) -> None:
    sizes = {"vocab_size": 99, "num_hidden_layers": 16, "attention_layers": [3]}
    sizes |= {"num_attention_heads": 16, "model_type": cls.model_type}
    with pytest.raises(ConfigError, match=message):
        config_from_dict({**sizes, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rotary_dim": 7}, "rotary_dim must be even and at most 256, not 7"),
        ({"rotary_dim": 258}, "rotary_dim must be even and at most 256, not 258"),
        ({"num_value_heads": 24}, "num_key_heads must divide 24, not 16"),
        ({"value_head_dim": 0}, "value_head_dim must be a positive integer"),
    ],
)
def test_qwen35_config_names_the_field(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen35Config(99, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rotary_dim": 3}, r"rotary_dim must be even and in 0\.\.64, not 3"),
        ({"rotary_dim": 66}, r"rotary_dim must be even and in 0\.\.64, not 66"),
        ({"num_groups": 5}, "num_groups must divide 48 heads, not 5"),
        ({"state_size": 0}, "state_size must be a positive integer"),
        ({"mamba_layers": (1, 0)}, r"mamba_layers must be in 0\.\.31 and in order, not \[1, 0\]"),
        ({"mixer_norm": 1}, "mixer_norm must be a boolean, not 1"),
        ({"residual_scale": 0.0}, r"residual_scale must be a float up to 10000, not 0\.0"),
        ({"embedding_scale": 12}, "embedding_scale must be a float up to 10000, not 12"),
        ({"attention_scale": -1.0}, r"attention_scale must be a float up to 10000, not -1\.0"),
    ],
)
def test_config_of_a_hybrid_over_mamba2_names_the_field(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Mamba2HybridConfig(99, **values)


@pytest.mark.parametrize("name", ["inner_size", "state_size", "dt_rank"])
def test_config_of_a_jamba_names_the_field(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a positive integer, not 0"):
        JambaConfig(99, **{name: 0})  # type: ignore[arg-type]


def test_layers_of_mamba2_are_those_without_attention() -> None:
    some = Mamba2HybridConfig(99, num_hidden_layers=4, attention_layers=(1,))
    assert some.is_mamba == [True, False, True, True] and some.ends_with_mlp
    assert replace(some, mamba_layers=(0, 2, 3)) == some
    alone = replace(some, mamba_layers=(0,))
    assert (alone.is_mamba, alone.ends_with_mlp) == ([True, False, False, False], False)
    assert [set(layer) for layer in alone.layer_states()] == [
        {"conv", "S"},
        {"k", "v"},
        set(),
        set(),
    ]
    assert "blocks.2.mixer.up.weight" in alone.weight_shapes()


def test_lfm2_config_needs_pairs_of_channels() -> None:
    with pytest.raises(ConfigError, match="head_dim must be even, not 7"):
        Lfm2Config(99, head_dim=7)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"context": 64}, "context must be 0 and past 'stop', not 64 and 'stop'"),
        ({"past": "slide"}, "context must be 0 and past 'stop', not 0 and 'slide'"),
        ({"context": "0"}, "context must be 0 and past 'stop', not '0' and 'stop'"),
    ],
)
def test_llama_with_windows_has_no_bound(values: dict[str, Any], message: str) -> None:
    window = {"window": 12, "far": "none", "features": 0}
    sizes = {"model_type": LlamaConfig.model_type, "vocab_size": 99, "num_hidden_layers": 1}
    config = config_from_dict({**sizes, "windows": [window]})
    assert (config.context, config.past, config.constant_state) == (0, "stop", True)
    assert config_from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match=message):
        config_from_dict({**sizes, "windows": [window], **values})


def test_windows_are_shortened_in_proportion_in_whole_blocks() -> None:
    far = LayerPlan(60, "relative", 8)
    windows = LayerPlan(12), far, LayerPlan(252, "delta", 8), LayerPlan(444)
    config = LlamaConfig(99, num_hidden_layers=4, windows=windows)
    shorter = config.with_longest_window(224)
    assert [plan.context for plan in shorter.windows] == [16, 32, 128, 224]
    assert [plan.features for plan in shorter.windows] == [0, 8, 8, 0]
    assert config.with_longest_window(config.longest_window) == config
    for context in (31, 449):
        with pytest.raises(ConfigError, match=r"--context must be in 32\.\.448, not"):
            config.with_longest_window(context)


def test_model_with_windows_of_one_block_is_served_as_it_is() -> None:
    config = LlamaConfig(99, num_hidden_layers=1, windows=(LayerPlan(12),))
    checkpoint = Checkpoint(config, {}, tiny_tokenizer(), "digest")
    assert bounded(checkpoint, Bound()) == checkpoint
    assert config.with_longest_window(16) == config


def test_bound_is_the_models_own_where_none_is_given() -> None:
    config = Qwen35Config(99, attention_layers=(3,), max_context=1000)
    assert (config.context, config.past, config.constant_state) == (992, "stop", False)
    assert replace(config, context=64).layer_states()[3]["k"].shape == (4, 2, 256, 16)
    constant = replace(config, attention_layers=())
    assert (constant.context, constant.constant_state) == (0, True)


def assert_same(found: ModelState, wanted: ModelState) -> None:
    for layer, wanted_layer in zip(found, wanted, strict=True):
        assert layer.keys() == wanted_layer.keys()
        for key, tensor in wanted_layer.items():
            assert_close(layer[key], tensor.double(), TOLERANCE)
