"""Compensated rounding loses less of the products than rounding to the nearest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from model.quantization.calibration import Double, gptq
from model.weights.int4 import Float, Int4, rounded
from tests.int4 import to_int4


def layer(seed: int, rows: int = 24, columns: int = 80) -> tuple[Float, Double]:
    """A matrix, and the products of inputs that depend on each other."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(500, 12)) @ random.normal(size=(12, columns))
    inputs += 0.3 * random.normal(size=inputs.shape)
    return random.normal(size=(rows, columns)).astype(np.float32), inputs.T @ inputs


def lost(matrix: Float, products: Double, found: Int4) -> npt.NDArray[np.float64]:
    """The squared error of the products, by row."""
    error = found.numbers().astype(np.float64) - matrix
    result: npt.NDArray[np.float64] = np.einsum("ij,jk,ik->i", error, products, error)
    return result


@pytest.mark.parametrize("seed", range(4))
def test_products_lose_less_than_by_rounding_to_the_nearest(seed: int) -> None:
    matrix, products = layer(seed)
    compensated, nearest = gptq(matrix, products), rounded(matrix)
    assert lost(matrix, products, compensated).sum() < lost(matrix, products, nearest).sum() / 3


def test_without_correlation_and_clipping_a_number_is_rounded_to_the_nearest() -> None:
    random = np.random.default_rng(1)
    matrix = random.integers(-7, 8, (3, 64)).astype(np.float32)
    matrix[:, ::32] = -8
    assert np.array_equal(gptq(matrix, np.eye(64)).numbers(), matrix)


@pytest.mark.parametrize("columns", [31, 32, 80])
def test_numbers_stay_when_they_are_rounded_again(columns: int) -> None:
    matrix, products = layer(5, columns=columns)
    found = gptq(matrix, products)
    assert found.codes.min() >= -8
    assert found.codes.max() <= 7
    assert np.array_equal(rounded(found.numbers()).numbers(), found.numbers())
    assert np.array_equal(to_int4(found.numbers()), found.numbers())


def test_rounding_to_the_nearest_is_that_of_the_definition() -> None:
    matrix = layer(6, columns=70)[0]
    assert np.array_equal(rounded(matrix).numbers(), to_int4(matrix))


def test_bits_are_equal_over_runs() -> None:
    matrix, products = layer(7)
    first, second = gptq(matrix, products), gptq(matrix.copy(), products.copy())
    assert first.codes.tobytes() == second.codes.tobytes()
    assert first.scales.tobytes() == second.scales.tobytes()


def test_zeros_stay_zeros_and_inputs_may_be_missing() -> None:
    matrix, products = layer(8)
    matrix[0], products[:, 3], products[3] = 0, 0, 0
    found = gptq(matrix, products).numbers()
    assert not found[0].any()
    assert np.isfinite(found).all()
    assert np.isfinite(gptq(matrix, np.zeros_like(products)).numbers()).all()
