from __future__ import annotations

import pytest

from model.convert.linearize.conversion import (
    SMOLLM2_135M,
    TWO_CORES,
    hours,
    memory,
    num_trained,
    num_weights,
)
from model.convert.linearize.plan import smollm2_plan
from model.convert.linearize.student import Student
from tests.model.convert.linearize.tiny import BLOCK_PLAN, SHAPE, tiny_llama

RANKS = {"qkv": 32, "out": 16}


def test_weights_are_those_of_the_model() -> None:
    matrices = [p for p in tiny_llama().parameters() if p.dim() == 2]
    assert num_weights(SHAPE) == sum(p.numel() for p in matrices)
    assert num_weights(SMOLLM2_135M) == 134_479_872


@pytest.mark.parametrize("ranks", [{"qkv": 2, "down": 3}, {"out": 0}])
def test_trained_numbers_are_nearly_those_of_the_student(ranks: dict[str, int]) -> None:
    """Scales, biases and gates are not counted."""
    parameters = dict(Student(tiny_llama(), BLOCK_PLAN, ranks).named_parameters())
    small = ("scale", "bias", "gates")
    counted = sum(p.numel() for name, p in parameters.items() if not name.endswith(small))
    assert num_trained(SHAPE, BLOCK_PLAN, ranks) == counted


def test_memory_of_smollm2_is_near_what_was_measured() -> None:
    """After a step of 1,024 tokens and one of 2,048; 0.94 GB when the source was read."""
    plan = smollm2_plan("6mb")
    found, longer = (memory(SMOLLM2_135M, plan, RANKS, length, 4) for length in (1024, 2048))
    assert found.most == pytest.approx(2.83e9, rel=0.1)
    assert longer.most == pytest.approx(5.55e9, rel=0.1)
    assert memory(SMOLLM2_135M, plan, RANKS, 1024, 2).source == found.source // 2


def test_hours_are_in_proportion_to_tokens_and_weights() -> None:
    assert hours(SMOLLM2_135M, TWO_CORES, 0, 0, 128 * 3600) == pytest.approx(1.0)
    assert hours(SMOLLM2_135M, TWO_CORES, 340 * 3600, 340 * 3600, 0) == pytest.approx(2.0)
    part = num_weights(SHAPE) / num_weights(SMOLLM2_135M)
    assert hours(SHAPE, TWO_CORES, 0, 0, 128 * 3600) == pytest.approx(part)
