from __future__ import annotations

import pytest

from model.attention import MECHANISMS, NOT_BUILT, REFUSED, spec_of
from model.config import ConfigError, ModelConfig


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_have_a_constant_state_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' cannot be autoregressive") as refused:
        ModelConfig(vocab_size=10, attention=name)
    assert REFUSED[name] in str(refused.value)


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_is_not_built_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is not built") as refused:
        ModelConfig(vocab_size=10, attention=name)
    assert NOT_BUILT[name] in str(refused.value)


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'elo' is unknown \(known: elu, relu"):
        ModelConfig(vocab_size=10, attention="elo")


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_option_refuses_what_it_cannot_be(name: str) -> None:
    for option, known in spec_of(name).options.items():
        for wrong in (None, [], -1, "sideways"):
            with pytest.raises(ConfigError, match=f"attention_options.{option} must be"):
                ModelConfig(vocab_size=10, attention=name, attention_options={option: wrong})
        ModelConfig(vocab_size=10, attention=name, attention_options={option: known.default})
    with pytest.raises(ConfigError, match=r"attention_options\.colour is unknown"):
        ModelConfig(vocab_size=10, attention=name, attention_options={"colour": 1})


def test_a_whole_number_is_a_number() -> None:
    for whole, fraction in ((10_000, 10_000.0), (500, 500.0)):
        configs = [
            ModelConfig(vocab_size=10, attention="elu", attention_options={"rope_theta": theta})
            for theta in (whole, fraction)
        ]
        assert spec_of("elu").values(configs[0])["rope_theta"] == fraction
        assert configs[0] == configs[1]
    with pytest.raises(ConfigError, match=r"attention_options\.window must be int, not 7\.0"):
        ModelConfig(vocab_size=10, attention="vq", attention_options={"window": 7.0})


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("cosformer", {"horizon": 31}, "horizon must be even, not 31"),
        ("gated", {"conv_size": 1}, "conv_size must be 0 or at least 2"),
        ("softmax", {"conv_size": 1}, "conv_size must be 0 or at least 2"),
        ("vq", {"window": 0}, "window must be in 1..65536, not 0"),
        ("soft_vq", {"beta": -0.5}, "beta must be in 0.0"),
        ("performer", {"map": "trig"}, "map must be 'favor' or 'simplified' or .* not 'trig'"),
        ("performer", {"projection": "redrawn"}, "projection 'redrawn' is not built: training"),
        ("performer", {"map": "hyperbolic", "features": 5}, "features must be even .* not 5"),
        ("cosine", {"order": 3}, "order must be in 1..2, not 3"),
        ("cosine", {"unit_length": False}, "unit_length must be true for order 1"),
        ("cosine", {"key_dim": 8}, "key_dim must be 0 for order 1"),
        ("delta", {"channel_decay": True, "decay": False}, "channel_decay must be false without"),
        ("window_linear", {"older": "forgotten", "features": 8}, "features must be 0 for older"),
    ],
)
def test_options_out_of_range_are_named(
    attention: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(vocab_size=10, attention=attention, attention_options=options)


@pytest.mark.parametrize("attention", ["elu", "performer", "retnet", "window_linear", "softmax"])
def test_rotary_positions_need_pairs(attention: str) -> None:
    options = {"rotary": "before"} if attention in ("elu", "performer") else {}
    with pytest.raises(ConfigError, match="must be even for rotary positions, not 5"):
        ModelConfig(vocab_size=10, attention=attention, head_dim=5, attention_options=options)
