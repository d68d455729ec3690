"""What int4 makes of weights, by its definition: codes of -8 to 7 and a float16 scale for 32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from model.tensor_spec import Shape
from model.weights import Array, StoredWeights

Float = npt.NDArray[np.float32]

GROUP = 32
#: What the number of the largest size may become, in the order in which they are tried.
CANDIDATES = (
    *(-8, -7.75, -7.5, -7.25, -7, -8.25, -8.5, -8.75, -9),
    *(-6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7),
)


def to_int4(matrix: Float) -> Float:
    """The numbers that a runtime multiplies with, in float32 steps as it takes them."""
    rows, columns = matrix.shape
    padded = np.zeros((rows, -(-columns // GROUP) * GROUP), np.float32)
    padded[:, :columns] = matrix
    groups = padded.reshape(-1, GROUP)
    scale = best_scales(groups)
    return (codes(groups, scale) * scale[:, None]).reshape(padded.shape)[:, :columns]


def best_scales(groups: Float) -> Float:
    """[groups], exact in float16."""
    largest = groups[np.arange(len(groups)), np.abs(groups).argmax(axis=1)]
    best, error = np.zeros_like(largest), np.full_like(largest, np.inf)

    def consider(wanted: Float) -> None:
        scale = wanted.astype(np.float16).astype(np.float32)
        left = groups - codes(groups, scale) * scale[:, None]
        found = in_order(left * left)
        best[:] = np.where(found < error, scale, best)
        error[:] = np.minimum(found, error)

    for to in CANDIDATES:
        consider(largest / np.float32(to))
    steps = codes(groups, best)
    squares = in_order(steps * steps)
    fitted = np.divide(in_order(groups * steps), squares, out=best.copy(), where=squares > 0)
    consider(fitted)
    return best


def codes(groups: Float, scale: Float) -> Float:
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    steps: Float = np.rint(np.clip(groups * inverse[:, None], -8, 7)).astype(np.float32)
    return steps


def in_order(numbers: Float) -> Float:
    """The sums of the rows, from the first number to the last."""
    total = np.zeros(len(numbers), np.float32)
    for column in numbers.T:
        total = total + column
    return total


class Q4Weights(StoredWeights):
    """Weights as a file of GGUF's Q4_0 gives them, all matrices in it but those of ``others``."""

    def __init__(self, weights: dict[str, Float], others: tuple[str, ...] = ()) -> None:
        self._weights, self._others = weights, others

    def __getitem__(self, name: str) -> Array:
        return self._weights[name]

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def shape(self, name: str) -> Shape:
        return self._weights[name].shape

    def is_float(self, name: str) -> bool:
        return True

    @property
    def stored_dtype(self) -> str:
        return "Q4_0"

    def dtype_of(self, name: str) -> str:
        return "Q6_K" if name in self._others else "Q4_0"
