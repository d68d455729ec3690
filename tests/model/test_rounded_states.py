"""Sums in bfloat16: their bytes, and how they are rounded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from model.architectures.config import Config, with_state_dtype
from model.config import ConfigError, ModelConfig
from model.families.rwkv7.config import Rwkv7Config
from model.foreign.tuned_states import state_block
from model.state import StateLayout, from_bfloat16, stored_block, to_bfloat16
from model.state_tensors import random_bits, round_at_random
from tests.tiny import ROUNDED, tiny_checkpoint

#: Numbers of every size, of both signs, and right between two of bfloat16.
VALUES = torch.cat(
    [
        torch.randn(2000, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-40, 30, 2000),
        torch.tensor([0.0, -0.0, 1.0, -3.0, 1.00390625, 1.01171875]),
    ]
)
POSITIONS = torch.arange(4096)


def narrow(config: Config) -> Config:
    return with_state_dtype(config, "bfloat16")


def test_sums_take_two_bytes_a_number_and_all_else_what_it_took() -> None:
    gated = ModelConfig(vocab_size=4096, attention="gated", attention_options={"conv_size": 4})
    assert StateLayout.of(narrow(gated)).num_bytes == 6 * (4 * 64 * 64 * 2 + 3 * 3 * 256 * 4)
    elu = ModelConfig(vocab_size=4096, attention="elu")  # z stays in float64
    assert StateLayout.of(narrow(elu)).num_bytes == 6 * 4 * (64 * 64 * 2 + 64 * 8)
    assert repr(StateLayout.of(narrow(elu))) != repr(StateLayout.of(elu))


def test_state_dtype_is_no_part_of_a_models_file() -> None:
    config = tiny_checkpoint("gated" + ROUNDED).config
    assert config.state_dtype == "bfloat16"
    assert config.to_dict() == tiny_checkpoint("gated").config.to_dict()
    with pytest.raises(ConfigError, match="unknown field 'state_dtype'"):
        ModelConfig.from_dict({**config.to_dict(), "state_dtype": "bfloat16"})


def test_state_without_sums_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--state-dtype bfloat16 .* state of lfm2 has none"):
        narrow(tiny_checkpoint("lfm2").config)
    with pytest.raises(ConfigError, match="must be float32 or bfloat16, not 'int8'"):
        with_state_dtype(tiny_checkpoint().config, "int8")  # type: ignore[arg-type]


def test_numbers_from_elsewhere_go_to_the_nearest() -> None:
    nearest = VALUES.bfloat16()
    assert np.array_equal(to_bfloat16(VALUES.numpy()), nearest.view(torch.int16).numpy().view("u2"))
    bits = to_bfloat16(VALUES.numpy())
    assert np.array_equal(from_bfloat16(bits), nearest.float().numpy())


def test_block_of_wide_sums_is_stored() -> None:
    config = tiny_checkpoint("gated").config
    layout, stored = StateLayout.of(config), StateLayout.of(narrow(config))
    block = np.zeros(layout.num_bytes, np.uint8)
    for number, views in enumerate(layout.views(block[None])):
        for tensor in views.values():
            tensor[...] = np.linspace(number, number + 1, tensor.size).reshape(tensor.shape)
    assert stored_block(block, config) is block
    found = stored.views(stored_block(block, narrow(config))[None])
    for wide, views in zip(layout.views(block[None]), found, strict=True):
        assert np.array_equal(views["S"], to_bfloat16(wide["S"]))
        assert all(np.array_equal(views[name], wide[name]) for name in wide if name != "S")


def test_tuned_state_is_stored_in_bfloat16() -> None:
    config = tiny_checkpoint("rwkv7").config
    assert isinstance(config, Rwkv7Config)
    sums = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).numpy()
    files = {f"blocks.{layer}.att.time_state": sums for layer in range(2)}
    wide = state_block(files, "file", config)
    assert np.array_equal(
        state_block(files, "file", dataclasses.replace(config, state_dtype="bfloat16")),
        stored_block(wide, narrow(config)),
    )


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_block_with_a_sum_that_is_not_finite_is_found(value: float) -> None:
    layout = StateLayout.of(tiny_checkpoint("gated" + ROUNDED).config)
    block = np.zeros(layout.num_bytes, np.uint8)
    assert layout.is_finite(block.data)
    bits = torch.tensor([value]).bfloat16().view(torch.int16).numpy().view("u2")
    layout.views(block[None])[1]["S"][0, 1, 2, 3] = bits[0]
    assert not layout.is_finite(block.data)


def test_rounding_takes_one_of_the_two_neighbours_and_keeps_what_is_one() -> None:
    down = (VALUES.view(torch.int32) & ~0xFFFF).view(torch.float32)
    up = ((VALUES.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    for position in (0, 1, 1 << 40):
        bits = random_bits(0, len(VALUES), torch.tensor([position]))[0]
        found = round_at_random(VALUES, bits).float()
        assert ((found == down) | (found == up)).all()
        kept = VALUES.bfloat16()
        assert torch.equal(round_at_random(kept.float(), bits), kept)


def test_mean_over_positions_is_the_number() -> None:
    """The nearest of 1 + 2**-10 would always be 1, and the mean of both neighbours is 1 + 2**-8."""
    for part in (0.125, 0.5, 0.75):
        values = torch.full((len(POSITIONS), 8), 1 + part / 128)
        found = round_at_random(values, random_bits(77, 8, POSITIONS)).double()
        share = (found - 1).mean(dim=0) * 128
        assert torch.allclose(share, torch.full_like(share, part), atol=0.03)


def test_many_small_updates_are_not_lost() -> None:
    total, nearest = torch.zeros(64), torch.zeros(64).bfloat16()
    for position in range(4000):
        bits = random_bits(0, 64, torch.tensor([position]))[0]
        total = round_at_random(total + 0.3, bits).float()
        nearest = nearest + 0.3
    assert nearest.max() < 200
    assert total.mean().item() == pytest.approx(1200, rel=0.02)


def test_bits_of_neighbours_and_of_following_tokens_are_independent() -> None:
    bits = random_bits(5, 64, POSITIONS).double() / 65536 - 0.5
    assert torch.equal(random_bits(6, 63, POSITIONS[9:10])[0], random_bits(5, 64, POSITIONS)[9, 1:])
    for one, other in ((bits[:, 1:], bits[:, :-1]), (bits[1:], bits[:-1])):
        correlation = (one * other).mean() / bits.square().mean()
        assert correlation.abs() < 0.01


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(value: float) -> None:
    values = torch.full((64,), value)
    found = round_at_random(values, torch.full((64,), 0xFFFF))
    assert torch.equal(found.isnan(), values.isnan())
    assert not found.isfinite().any()
    with_a_load = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert not round_at_random(with_a_load, torch.tensor([0xFFFF])).isfinite().any()
