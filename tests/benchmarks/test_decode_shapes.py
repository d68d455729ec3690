"""Who is compared has as many parameters, and rows that llama.cpp can quantize."""

from __future__ import annotations

import pytest

from benchmarks.decode.models import config_of, own_parameters, random_weights
from benchmarks.decode.shapes import BLOCK, SIZES, count, matching_width, peer_tensors
from model.weights import num_parameters

COMPARED = ("S1", "S2")


@pytest.mark.parametrize("size", COMPARED)
@pytest.mark.parametrize("architecture", ["llama", "rwkv7"])
def test_peer_has_as_many_parameters_within_two_percent_and_never_more(
    size: str, architecture: str
) -> None:
    wanted = SIZES[size].num_parameters
    assert 0.98 * wanted < count(peer_tensors(SIZES[size], architecture)) <= wanted


@pytest.mark.parametrize("size", COMPARED)
@pytest.mark.parametrize("attention", ["gated", "elu"])
def test_ours_has_as_many_parameters_within_one_percent(size: str, attention: str) -> None:
    found = num_parameters(config_of(SIZES[size], attention))
    assert found == pytest.approx(SIZES[size].num_parameters, rel=0.01)


def test_size_counts_what_the_config_counts() -> None:
    config = config_of(SIZES["S1"], "elu")
    assert own_parameters(config, config.intermediate_size) == SIZES["S1"].num_parameters


@pytest.mark.parametrize("architecture", ["llama", "rwkv7"])
def test_rows_of_a_peers_matrices_are_whole_blocks(architecture: str) -> None:
    for size in COMPARED:
        for name, shape in peer_tensors(SIZES[size], architecture).items():
            assert shape[-1] % BLOCK == 0, name


def test_matching_width_is_the_nearest() -> None:
    assert matching_width(lambda width: 10 + 7 * width, 10 + 7 * 5 + 3) == 5
    assert matching_width(lambda width: 10 + 7 * width, 10 + 7 * 5 + 4) == 6


def test_random_weights_are_all_there_and_the_same_every_time() -> None:
    config = config_of(SIZES["tiny"], "gated")
    first, second = random_weights(config), random_weights(config)
    assert {name: weight.shape for name, weight in first.items()} == config.weight_shapes()
    assert all((first[name] == second[name]).all() for name in first)
    assert all(weight.any() for weight in first.values())
