"""What training a Mamba-2 starts from, its sizes, and the gradients that it follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ConfigError
from model.families.mamba import network as mamba_network
from model.families.mamba.config import Mamba2Config
from model.families.mamba.network import Mamba2
from model.state import StateLayout


def small(**chosen: Any) -> Mamba2Config:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "head_dim": 16}
    return Mamba2Config.for_training(300, 7, {**sizes, **chosen})


def test_sizes_that_are_not_chosen_follow_from_the_width() -> None:
    config = small(attention_options={"state_size": 5})
    assert (config.num_attention_heads, config.inner_size, config.state_size) == (4, 64, 5)
    assert (config.bos_token_id, config.eos_token_id, config.tied) == (7, 7, True)
    assert small(num_attention_heads=3).inner_size == 48
    assert small(attention="mamba2") == small()
    assert small(hidden_size=256, attention_options={"num_groups": 32}).num_groups == 32


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"attention": "delta"}, "attention must be 'mamba2', not 'delta'"),
        ({"attention_options": {"rank": 3}}, "attention_options must be an object of state_size"),
        ({"attention_options": [3]}, "attention_options must be an object of state_size"),
        ({"attention_options": {"state_size": 0}}, "state_size must be a positive integer"),
        ({"attention_options": {"conv_size": 1}}, "conv_size must be at least 2, not 1"),
        ({"attention_options": {"num_groups": 3}}, "num_groups must divide 4 heads, not 3"),
        ({"head_dim": 48}, r"head_dim must divide 2 \* hidden_size = 64"),
        ({"intermediate_size": 64}, "intermediate_size is not supported: a Mamba-2 has no MLP"),
        ({"hidden_size": -3}, "hidden_size must be a positive integer"),
    ],
)
def test_size_that_cannot_be_is_named(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**chosen)


def test_initial_weights_are_those_of_the_published_trainer() -> None:
    model = Mamba2(small(hidden_size=256))
    model.init_weights(torch.Generator().manual_seed(0))
    for layer in range(3):
        mixer = model.get_submodule(f"blocks.{layer}.mixer")
        weights = dict(mixer.named_parameters())
        delta = torch.nn.functional.softplus(weights["dt_bias"])
        assert delta.min() * 1.001 >= 1e-3 and delta.max() <= 0.1001
        assert delta.log().std() > 1  # as even on a log scale
        rates = weights["A_log"].exp()
        assert 1 <= rates.min() < 4 and 13 < rates.max() <= 16
        assert (weights["D"] == 1).all() and (weights["norm.weight"] == 1).all()
        wanted = {"in.weight": 256**-0.5, "conv": 0.5, "conv_bias": 0.5}
        wanted["out.weight"] = 512**-0.5 / 3**0.5
        for name, bound in wanted.items():
            assert 0.98 * bound < weights[name].abs().max() <= bound * 1.001, name


def test_published_sizes_have_their_bytes_of_state() -> None:
    """130M, 780M and Codestral 7B: 19.4, 77.4 and 276.3 MB."""
    sizes = [(24, 768, 24, 1), (48, 1536, 48, 1), (64, 4096, 128, 8)]
    configs = [
        Mamba2Config(50288, width, layers, heads, num_groups=groups)
        for layers, width, heads, groups in sizes
    ]
    found = [round(StateLayout.of(config).num_bytes / 1e6, 1) for config in configs]
    assert found == [19.4, 77.4, 276.3]


def inputs(num_tokens: int, dtype: torch.dtype, strongest: float) -> list[Tensor]:
    """x, log_decay, b, c of 4 heads in 2 groups, and S; decays from none to ``strongest``."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype)

    log_decay = -strongest * normal(num_tokens, 4).sigmoid() ** 4
    return [
        *(normal(num_tokens, 4, 5), log_decay, normal(num_tokens, 2, 8)),
        *(normal(num_tokens, 2, 8), normal(4, 8, 5)),
    ]


def by_steps(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    outputs = []
    for token in zip(*(tensor.unbind(1) for tensor in (x, log_decay, b, c)), strict=True):
        y, state = mamba_network.step(*token, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("strongest", [1e-3, 2.0, 800.0])
@pytest.mark.parametrize("num_tokens", [1, 64, 100, 200])
def test_gradients_of_the_chunk_are_those_of_the_steps_in_float64(
    num_tokens: int, strongest: float
) -> None:
    """Of every input and of the state that a window starts from."""
    found = []
    for form in (mamba_network.chunk, by_steps):
        leaves = [t.requires_grad_() for t in inputs(num_tokens, torch.float64, strongest)]
        y, last = form(*leaves)
        loss = (y * torch.arange(y.numel()).view_as(y).cos()).sum() + last.square().sum()
        found.append([y, last, *torch.autograd.grad(loss, leaves)])
    for chunked, stepped in zip(*found, strict=True):
        torch.testing.assert_close(chunked, stepped, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strongest", [1e-3, 2.0, 800.0])
def test_float32_is_near_float64_for_decays_of_any_strength(strongest: float) -> None:
    wanted, _ = by_steps(*inputs(200, torch.float64, strongest))
    found, _ = mamba_network.chunk(*inputs(200, torch.float32, strongest))
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_recurrence_is_float32_under_autocast() -> None:
    wanted = mamba_network.chunk(*inputs(80, torch.float32, 2.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mamba_network.chunk(*inputs(80, torch.float32, 2.0))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
