"""Random features estimate the softmax kernel without bias, whatever their rows share."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from model.ops.exponential import (
    gaussian_projection,
    log_positive_features,
    trigonometric_features,
)

DIM = 16


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair(norm: float, cosine: float) -> tuple[Tensor, Tensor]:
    """Two float64 vectors of one norm at a given angle."""
    q = torch.zeros(DIM, dtype=torch.float64)
    k = torch.zeros(DIM, dtype=torch.float64)
    q[0] = norm
    k[0], k[5] = norm * cosine, norm * math.sqrt(1 - cosine**2)
    return q, k


def estimates(kind: str, orthogonal: bool, q: Tensor, k: Tensor, num_draws: int) -> Tensor:
    """Independent estimates of exp(q . k), each from its own projection of 24 rows."""
    source = generator(3)
    results = []
    for _ in range(num_draws):
        projection = gaussian_projection(24, DIM, source, orthogonal).double()
        if kind == "positive":
            phi_q, phi_k = (log_positive_features(x, projection).exp() for x in (q, k))
        else:
            phi_q, phi_k = (trigonometric_features(x, projection) for x in (q, k))
        results.append(phi_q @ phi_k / 24)
    return torch.stack(results)


@pytest.mark.slow
@pytest.mark.parametrize("cosine", [-0.8, 0.0, 0.8])
@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("kind", ["positive", "trigonometric"])
def test_estimate_is_unbiased_within_its_standard_error(
    kind: str, orthogonal: bool, cosine: float
) -> None:
    q, k = pair(0.7, cosine)
    draws = estimates(kind, orthogonal, q, k, 3000)
    standard_error = draws.std() / math.sqrt(len(draws))
    wanted = (q @ k).exp()
    assert standard_error < 0.02 * wanted
    assert abs(draws.mean() - wanted) < 4 * standard_error


def test_variance_of_independent_positive_features_is_the_known_one() -> None:
    q, k = pair(0.5, 0.3)
    draws = estimates("positive", False, q, k, 4000)
    relative = ((q + k).square().sum().exp() - 1) / 24
    assert (draws.var() / (2 * q @ k).exp() / relative - 1).abs() < 0.15


@pytest.mark.parametrize("kind", ["positive", "trigonometric"])
def test_orthogonal_rows_lower_the_variance(kind: str) -> None:
    q, k = pair(0.7, 0.5)
    independent, orthogonal = (estimates(kind, o, q, k, 3000).var() for o in (False, True))
    assert orthogonal < 0.95 * independent


@pytest.mark.parametrize("num_features", [1, 15, 16, 17, 40])
def test_rows_are_orthogonal_within_each_block(num_features: int) -> None:
    projection = gaussian_projection(num_features, DIM, generator())
    assert projection.shape == (num_features, DIM)
    assert projection.dtype == torch.float32
    for block in projection.double().split(DIM):
        directions = block / block.norm(dim=1, keepdim=True)
        torch.testing.assert_close(
            directions @ directions.T, torch.eye(len(block)).double(), rtol=0.0, atol=1e-6
        )


def test_blocks_are_independent_of_each_other() -> None:
    first, second = gaussian_projection(2 * DIM, DIM, generator()).split(DIM)
    assert (first @ second.T).abs().max() > 1.0


@pytest.mark.parametrize("orthogonal", [False, True])
def test_rows_are_standard_normal(orthogonal: bool) -> None:
    source = generator(1)
    rows = torch.cat([gaussian_projection(DIM, DIM, source, orthogonal) for _ in range(500)])
    num_rows = len(rows)
    assert rows.mean(0).abs().max() < 4.5 / math.sqrt(num_rows)
    squares = rows.square().sum(1)  # chi-square with DIM degrees: mean DIM, variance 2 DIM
    assert abs(squares.mean() - DIM) < 4 * math.sqrt(2 * DIM / num_rows)
    assert abs(squares.var() / (2 * DIM) - 1) < 0.1


def test_generator_decides_the_draw() -> None:
    first, again, other = (gaussian_projection(40, DIM, generator(s)) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    source = generator(1)
    assert not torch.equal(gaussian_projection(8, DIM, source), gaussian_projection(8, DIM, source))


def test_each_head_has_its_own_projection() -> None:
    source = generator()
    projection = torch.stack([gaussian_projection(24, DIM, source) for _ in range(3)])
    x = torch.randn(2, 5, 3, DIM, generator=source)
    for features in (log_positive_features, trigonometric_features):
        both = features(x, projection)
        for head in range(3):
            alone = features(x[:, :, head], projection[head])
            torch.testing.assert_close(both[:, :, head], alone)
