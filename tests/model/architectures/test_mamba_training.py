"""What training a Mamba-1 starts from, and its sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.config import ConfigError
from model.families.mamba.config import MambaConfig
from model.families.mamba.network import Mamba
from model.state import StateLayout


def small(**chosen: Any) -> MambaConfig:
    return MambaConfig.for_training(300, 7, {"hidden_size": 40, "num_hidden_layers": 3, **chosen})


def test_sizes_that_are_not_chosen_follow_from_the_width() -> None:
    config = small(attention_options={"state_size": 5}, head_dim=64)
    assert (config.inner_size, config.dt_rank, config.state_size) == (80, 3, 5)
    assert (config.bos_token_id, config.eos_token_id, config.tied) == (7, 7, True)
    assert small(attention="mamba", attention_options={"dt_rank": 9}).dt_rank == 9


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"attention": "delta"}, "attention must be 'mamba', not 'delta'"),
        ({"attention_options": {"rank": 3}}, "attention_options must be an object of inner_size"),
        ({"attention_options": [3]}, "attention_options must be an object of inner_size"),
        ({"attention_options": {"dt_rank": 0}}, "dt_rank must be a positive integer"),
        ({"attention_options": {"conv_size": 1}}, "conv_size must be at least 2, not 1"),
        ({"intermediate_size": 64}, "intermediate_size is not supported: a Mamba has no MLP"),
        ({"num_attention_heads": 4}, "num_attention_heads is not supported: a Mamba has no MLP"),
        ({"hidden_size": -3}, "hidden_size must be a positive integer"),
    ],
)
def test_size_that_cannot_be_is_named(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**chosen)


def test_initial_weights_are_those_of_the_published_trainer() -> None:
    model = Mamba(small(hidden_size=256))
    model.init_weights(torch.Generator().manual_seed(0))
    for layer in range(3):
        weights = dict(model.get_submodule(f"blocks.{layer}.mixer").named_parameters())
        delta = torch.nn.functional.softplus(weights["dt.bias"])
        assert delta.min() * 1.001 >= 1e-3 and delta.max() <= 0.1001
        assert delta.log().std() > 1  # as even on a log scale
        torch.testing.assert_close(weights["A_log"][5].exp(), torch.arange(1.0, 17.0))
        assert (weights["D"] == 1).all()
        wanted = {"in.weight": 256**-0.5, "x.weight": 512**-0.5, "dt.weight": 16**-0.5}
        wanted |= {"conv": 0.5, "conv_bias": 0.5, "out.weight": 512**-0.5 / 3**0.5}
        for name, bound in wanted.items():
            assert 0.98 * bound < weights[name].abs().max() <= bound * 1.001, name


def test_published_sizes_have_their_bytes_of_state() -> None:
    """130M, 2.8B and Falcon-Mamba 7B: 2.8, 24.9 and 39.8 MB."""
    sizes = [(24, 768), (64, 2560), (64, 4096)]
    configs = [MambaConfig(50280, width, layers, inner_size=2 * width) for layers, width in sizes]
    found = [round(StateLayout.of(config).num_bytes / 1e6, 1) for config in configs]
    assert found == [2.8, 24.9, 39.8]
