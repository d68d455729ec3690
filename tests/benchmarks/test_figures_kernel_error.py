"""The kernel's figure: errors are what they are called, and fall as theory says."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.studies.kernel_error import (
    KINDS,
    Error,
    Setting,
    estimate,
    make_inputs,
    measure,
    one_draw,
    relative,
    summary,
    weighted_mean,
)
from model.ops.exponential import gaussian_projection

SMALL = Setting(dim=16, scale=0.4)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_exact_kernel_is_that_of_scaled_attention() -> None:
    inputs = make_inputs(Setting(16, 1.0), 50, generator())
    q, k, _ = torch.randn((3, 50, 16), generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(inputs.kernel, (q @ k.T / 4.0).exp())
    weights = (q @ k.T / 4.0).softmax(dim=1)
    torch.testing.assert_close(inputs.output, weights @ inputs.v)


@pytest.mark.parametrize("kind", KINDS)
def test_mean_of_the_estimates_is_the_kernel(kind: str) -> None:
    inputs = make_inputs(SMALL, 12, generator())
    source = generator(1)
    orthogonal = KINDS[kind][1]
    draws = torch.stack(
        [
            estimate(kind, gaussian_projection(64, 16, source, orthogonal).double(), inputs)
            for _ in range(400)
        ]
    )
    standard_error = draws.std(dim=0) / math.sqrt(len(draws))
    assert ((draws.mean(dim=0) - inputs.kernel).abs() < 5 * standard_error).all()
    assert relative(draws.mean(dim=0), inputs.kernel) < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_times_the_features_make_a_quarter_of_the_error(kind: str) -> None:
    inputs = make_inputs(SMALL, 64, generator())
    source = generator(1)
    few, many = (
        sum(one_draw(kind, width, inputs, source).kernel for _ in range(20)) for width in (32, 512)
    )
    assert 3.0 < few / many < 5.5


@pytest.mark.parametrize(
    ("kind", "num_rows"), [("positive, orthogonal", 32), ("sin/cos, orthogonal", 16)]
)
def test_trigonometric_features_get_rows_for_half_their_width(kind: str, num_rows: int) -> None:
    drawn, expected = generator(), generator()
    one_draw(kind, 32, make_inputs(SMALL, 8, generator(1)), drawn)
    gaussian_projection(num_rows, 16, expected)
    assert torch.equal(drawn.get_state(), expected.get_state())


def test_queries_with_a_bad_denominator_are_counted() -> None:
    inputs = make_inputs(Setting(64, 1.0), 64, generator())
    lost = {kind: one_draw(kind, 8, inputs, generator(1)).lost_queries for kind in KINDS}
    assert lost["positive, orthogonal"] == lost["positive, independent"] == 0
    assert lost["sin/cos, independent"] > 5


def test_summary_has_mean_and_spread_of_the_draws() -> None:
    errors = [Error(kernel=float(i), output=2.0 * i, lost_queries=1) for i in range(1, 12)]
    found = summary(errors, length=10)
    assert found["kernel"] == {
        "mean": 6.0, "deviation": 3.317, "p10": 2.0, "median": 6.0, "p90": 10.0
    }  # fmt: skip
    assert found["output"]["median"] == 12.0
    assert found["queries_with_bad_denominator"] == 0.1


def test_yardstick_is_the_plain_mean_of_values() -> None:
    result = measure(SMALL, [4], num_draws=2, length=32, seed=5)
    inputs = make_inputs(SMALL, 32, generator(5))
    mean = inputs.v.mean(dim=0).expand_as(inputs.v)
    expected = float((mean - inputs.output).norm() / inputs.output.norm())
    assert result.without_features["output"] == round(expected, 4)


def test_weights_of_either_sign_are_normalised() -> None:
    weights = torch.tensor([[1.0, -3.0]], dtype=torch.float64)
    v = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    assert weighted_mean(weights, v).item() == 2.5
