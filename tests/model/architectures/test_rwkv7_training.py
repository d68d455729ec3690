"""What training an RWKV-7 starts from, and the gradients that it follows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ConfigError
from model.families.rwkv7 import network as rwkv7_network
from model.families.rwkv7.config import Rwkv7Config, suggested_ranks
from model.families.rwkv7.network import Inputs, Rwkv7, initial_weights


def small(**chosen: Any) -> Rwkv7Config:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "head_dim": 16}
    return Rwkv7Config.for_training(300, 0, {**sizes, **chosen})


def initial(config: Rwkv7Config) -> dict[str, Tensor]:
    return initial_weights(config, torch.Generator().manual_seed(0))


def test_ranks_are_those_that_the_published_trainer_suggests() -> None:
    names = ("decay_rank", "rate_rank", "value_rank", "gate_rank")
    of_0_1b, of_1_5b = suggested_ranks(768), suggested_ranks(2048)
    assert [of_0_1b[name] for name in names] == [64, 64, 32, 128]
    assert [of_1_5b[name] for name in names] == [128, 128, 64, 224]
    assert set(suggested_ranks(64).values()) == {32}


def test_sizes_that_are_not_chosen_follow_from_the_width() -> None:
    config = small(attention_options={"gate_rank": 5})
    assert config.intermediate_size == 128
    assert (config.gate_rank, config.decay_rank) == (5, 32)
    assert small(intermediate_size=48).intermediate_size == 48
    assert small(num_attention_heads=2, attention="rwkv7") == small()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"num_attention_heads": 4}, "num_attention_heads is hidden_size / head_dim = 2, not 4"),
        ({"attention": "delta"}, "attention must be 'rwkv7', not 'delta'"),
        ({"attention_options": {"rank": 3}}, "attention_options must be an object of decay_rank"),
        ({"attention_options": [3]}, "attention_options must be an object of decay_rank"),
        ({"attention_options": {"gate_rank": 0}}, "gate_rank must be a positive integer"),
        ({"hidden_size": -3}, "hidden_size must be a positive integer"),
    ],
)
def test_size_that_cannot_be_is_named(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**chosen)


def test_initial_weights_are_those_of_the_published_trainer() -> None:
    """By its own loops over channels; matrices by what they do."""
    config = small()
    weights, width, layers = initial(config), 32, 3
    assert {name: tuple(t.shape) for name, t in weights.items()} == config.weight_shapes()
    for layer in range(layers):
        block = f"blocks.{layer}.time_mix"
        late, early = layer / (layers - 1), 1 - layer / layers
        for n in range(width):
            linear, zigzag = n / (width - 1) - 0.5, ((n % 16) - 7.5) / 7.5
            zigzag *= abs(zigzag)
            decay = -6 + 6 * (n / (width - 1)) ** (1 + late**0.3) + 0.5 + 2.5 * zigzag
            near(weights[f"{block}.decay.up.bias"][n], decay)
            near(weights[f"{block}.rate.up.bias"][n], -0.19 + 0.3 * zigzag + 0.4 * linear)
            near(weights[f"{block}.k_k"][n], 0.71 - 0.1 * linear)
            shifts = [1 - (n / width) ** (p * early) for p in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]
            for row, shift in enumerate(shifts):
                near(weights[f"{block}.shift_mix"][row, n], shift)
            channel_shift = weights[f"blocks.{layer}.channel_mix.shift_mix"][n]
            near(channel_shift, 1 - (n / width) ** (early**4))
            if layer:
                near(weights[f"{block}.value_mix.up.bias"][n], 0.73 - 0.4 * linear)
        assert weights[f"{block}.group_norm.weight"].unique().item() == pytest.approx(
            ((1 + layer) / layers) ** 0.7
        )
        for name in ("output", "decay.down", "rate.down", "gate.down"):
            assert not weights[f"{block}.{name}.weight"].any()
        assert not weights[f"blocks.{layer}.channel_mix.value.weight"].any()
        orthogonal(weights[f"{block}.receptance.weight"], 1.0)
        orthogonal(weights[f"{block}.key.weight"], 0.1)
        orthogonal(weights[f"{block}.gate.up.weight"], 0.1)
        orthogonal(weights[f"blocks.{layer}.channel_mix.key.weight"], 1.0)
    assert 0.9e-4 < weights["embedding.weight"].abs().max() <= 1e-4
    orthogonal(weights["head.weight"], 0.5 * math.sqrt(300 / 32))


def near(found: Tensor, wanted: float) -> None:
    assert found.item() == pytest.approx(wanted, abs=1e-5)


def orthogonal(matrix: Tensor, gain: float) -> None:
    """The shorter side's rows or columns are at right angles, of length ``gain``."""
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wanted = gain**2 * torch.eye(len(short))
    torch.testing.assert_close(short @ short.T, wanted, rtol=0, atol=1e-5 * max(1, gain**2))


def test_one_layer_has_initial_weights_too() -> None:
    weights = initial(small(num_hidden_layers=1, hidden_size=16))
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert weights.keys() == small(num_hidden_layers=1, hidden_size=16).weight_shapes().keys()


def inputs(num_tokens: int, seed: int = 3) -> list[Tensor]:
    """r, log_w, k, v, c, d [2, T, 2, 8] in float64, with decays from none to the fastest."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(2, num_tokens, 2, 8, generator=generator, dtype=torch.float64)

    c = torch.nn.functional.normalize(normal(), dim=-1)
    log_w = -math.exp(-0.5) * (3 * normal()).sigmoid()
    return [normal(), log_w, normal(), normal(), c, c * normal().sigmoid()]


@pytest.mark.parametrize("num_tokens", [1, 16, 37])
def test_gradients_of_the_chunk_are_those_of_the_steps_in_float64(num_tokens: int) -> None:
    """Of every input and of the state that a window starts from."""
    tensors = inputs(num_tokens)
    generator = torch.Generator().manual_seed(4)
    state = torch.randn(2, 2, 8, 8, generator=generator, dtype=torch.float64)
    weights = torch.randn(2, num_tokens, 2, 8, generator=generator, dtype=torch.float64)
    found = []
    for form in (rwkv7_network.chunk, by_steps):
        leaves = [tensor.clone().requires_grad_() for tensor in (*tensors, state)]
        y, last = form(Inputs(*leaves[:-1]), leaves[-1])
        loss = (y * weights).sum() + last.square().sum()
        found.append([y, last, *torch.autograd.grad(loss, leaves)])
    for chunked, stepped in zip(*found, strict=True):
        assert stepped.abs().max() > 0
        torch.testing.assert_close(chunked, stepped, rtol=1e-9, atol=1e-9)


def by_steps(tokens: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for token in zip(*(tensor.unbind(1) for tensor in tokens), strict=True):
        y, state = rwkv7_network.step(Inputs(*token), state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def test_recurrence_is_float32_under_autocast() -> None:
    tokens = Inputs(*(tensor.float() for tensor in inputs(40)))
    state = torch.zeros(2, 2, 8, 8)
    wanted = rwkv7_network.chunk(tokens, state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rwkv7_network.chunk(tokens, state)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_gradients_under_autocast_are_near_those_of_float32() -> None:
    model = Rwkv7(small())
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():  # so that no gradient is zero
            parameter += 0.05 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
    tokens = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(2))
    found = []
    for low in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            loss = torch.nn.functional.cross_entropy(
                model.parallel(tokens).float().flatten(0, 1), tokens.flip(0).flatten()
            )
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    names = [name for name, _ in model.named_parameters()]
    for name, wide, low_ in zip(names, *found, strict=True):
        assert low_.dtype == torch.float32
        assert (low_ - wide).norm() < 0.1 * wide.norm(), name
