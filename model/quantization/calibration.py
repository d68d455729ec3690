"""Weights as int4 for the inputs that the matrices of a model have while it reads a text: GPTQ."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from model.architectures.hybrid import with_past
from model.architectures.network import model_of
from model.checkpoint import Checkpoint
from model.evaluation import DataError, documents
from model.weights.int4 import GROUP, Float, Int4, codes_of, largest, num_groups, to_float16

# -------------------------------------------------------------------------------------------------
# Rounding to int4 that compensates its errors: GPTQ, Frantar et al. 2022, arXiv 2210.17323.
#
# A matrix W [n, k] multiplies inputs x whose products are H = sum x x^T [k, k]. Its columns are
# rounded in order. What a column loses is taken out of the columns that follow, so that the
# products change least: with U the upper Cholesky factor of H^-1 (algorithm 1)
#
#     W[:, l] -= (W[:, j] - Q[:, j]) / U[j, j] * U[j, l]    for all l > j.
#
# As in the paper the diagonal of H is damped by a hundredth of its mean. The scale of a group is
# chosen when its first column is reached, for the numbers as they are compensated by then: of those
# with which the number of the largest size becomes -8 or 8, or is clipped, the one of the least
# squared error, in which column j counts 1 / U[j, j]^2 times.


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


# -------------------------------------------------------------------------------------------------
# Weights as int4 for the inputs that the matrices of a model have while it reads a text.
#
# All windows of the text are read at once. When a matrix is reached, it is rounded for its inputs
# (`GPTQ`) and replaced, so that those after it see inputs as they will be. This
# needs torch.


WINDOW = 512
#: Windows that are read of a text, and those that it must have.
MAX_WINDOWS, MIN_WINDOWS = 64, 4
#: Rows of inputs that are widened to float64 at a time.
_ROWS = 4096


@torch.no_grad()
def calibrated(
    checkpoint: Checkpoint, names: Collection[str], text: Path, threads: int
) -> dict[str, Int4]:
    """The matrices of these ``names`` as int4 for the inputs that the ``text`` gives them.

    The first `MAX_WINDOWS` windows of the text are read, `WINDOW` tokens each, from the empty
    state. Raises `DataError` for a text of fewer than `MIN_WINDOWS` and for a file that is no text.
    """
    windows, config = _windows(checkpoint, text), checkpoint.config
    if config.context:
        config = with_past(config, WINDOW, "stop")
    model = model_of(config, checkpoint.weights)
    torch.set_num_threads(threads)
    found: dict[str, Int4] = {}
    for name in names:
        layer = model.get_submodule(name.removesuffix(".weight"))
        layer.register_forward_pre_hook(partial(_round, found, name))
    model.hidden_parallel(windows)
    assert found.keys() == set(names), set(names) - found.keys()
    return found


def _round(found: dict[str, Int4], name: str, layer: nn.Module, inputs: tuple[Tensor]) -> None:
    """Replaces the weight of a layer that is about to multiply ``inputs`` [..., k]."""
    assert isinstance(layer, nn.Linear), name
    found[name] = gptq(layer.weight.numpy(), _products(inputs[0]))
    layer.weight.copy_(torch.from_numpy(found[name].numbers()))


def _products(inputs: Tensor) -> Double:
    """The sum of x x^T over the rows of [..., k]."""
    rows = inputs.flatten(end_dim=-2)
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for part in rows.split(_ROWS):
        wide = part.double()
        total += wide.T @ wide
    return total.numpy()


def _windows(checkpoint: Checkpoint, text: Path) -> Tensor:
    """The windows, [B, T] int64; the text's documents follow the token of an end each."""
    ids: list[int] = []
    for part in _texts(text):
        ids += [checkpoint.tokenizer.eos_token_id, *checkpoint.tokenizer.encode(part)]
        if len(ids) >= MAX_WINDOWS * WINDOW:
            break
    num = min(len(ids) // WINDOW, MAX_WINDOWS)
    if num < MIN_WINDOWS:
        raise DataError(
            f"{text} has {len(ids):,} tokens, too few to calibrate: it takes"
            f" {MIN_WINDOWS * WINDOW:,}, and {MAX_WINDOWS * WINDOW:,} are better"
        )
    return torch.from_numpy(np.array(ids[: num * WINDOW])).view(num, WINDOW)


def _texts(path: Path) -> Iterator[str]:
    """Its documents. Raises `DataError` where it is not UTF-8."""
    try:
        yield from documents(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text in UTF-8: {error.reason}") from error
