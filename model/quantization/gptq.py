"""Rounding to int4 that compensates its errors: GPTQ, Frantar et al. 2022, arXiv 2210.17323.

A matrix W [n, k] multiplies inputs x whose products are H = sum x x^T [k, k]. Its columns are
rounded in order. What a column loses is taken out of the columns that follow, so that the products
change least: with U the upper Cholesky factor of H^-1 (algorithm 1)

    W[:, l] -= (W[:, j] - Q[:, j]) / U[j, j] * U[j, l]    for all l > j.

As in the paper the diagonal of H is damped by a hundredth of its mean. The scale of a group is
chosen when its first column is reached, for the numbers as they are compensated by then: of those
with which the number of the largest size becomes -8 or 8, or is clipped, the one of the least
squared error, in which column j counts 1 / U[j, j]^2 times.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from model.weights.int4 import GROUP, Float, Int4, codes_of, largest, num_groups, to_float16

DAMPING = 0.01
#: Parts of the largest number that a scale reaches up to.
_REACHES = (1.0, -1.0, 0.95, -0.95, 0.9, -0.9, 0.85, -0.85, 0.8, -0.8, 0.75, -0.75, 0.7, -0.7)

Double = npt.NDArray[np.float64]


def gptq(matrix: Float, products: Double) -> Int4:
    """A finite ``matrix`` [n, k] as int4 for inputs with these ``products`` H [k, k]."""
    left = matrix.astype(np.float64)
    rows, columns = left.shape
    codes = np.empty((rows, columns), np.int8)
    scales = np.empty((rows, num_groups(columns)), np.float16)
    factor = _factor(products)
    for group in range(scales.shape[1]):
        begin, end = group * GROUP, min((group + 1) * GROUP, columns)
        numbers, lost = left[:, begin:end], np.empty((rows, end - begin))
        scale = _scale(numbers, factor.diagonal()[begin:end] ** -2)
        scales[:, group] = scale
        for j in range(end - begin):
            row = factor[begin + j, begin:end]
            found = codes_of(numbers[:, j], scale)
            codes[:, begin + j] = found
            lost[:, j] = (numbers[:, j] - found * scale) / row[j]
            numbers[:, j + 1 :] -= np.outer(lost[:, j], row[j + 1 :])
        left[:, end:] -= lost @ factor[begin:end, end:]
    return Int4(codes, scales)


def _scale(numbers: Double, counts: Double) -> Double:
    """The scales [n] of a group [n, columns], of whose squared errors column j counts so often."""
    most = largest(numbers)
    found, least = np.empty_like(most), np.full(len(most), np.inf)
    for reach in _REACHES:
        scale = to_float16(most * (reach / -8))
        lost = codes_of(numbers, scale[:, None]) * scale[:, None] - numbers
        error = lost**2 @ counts
        found = np.where(error < least, scale, found)
        least = np.minimum(error, least)
    return found


def _factor(products: Double) -> Double:
    """The upper Cholesky factor U of the inverse of the damped products: U^T U."""
    mean = products.diagonal().mean()
    damped = products + np.eye(len(products)) * (DAMPING * mean if mean else 1.0)
    upper: Double = np.linalg.cholesky(np.linalg.inv(damped)).T
    return upper
