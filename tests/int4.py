"""What int4 makes of weights, by its definition: codes of -8 to 7 and a float16 scale for 32."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from model.tensor_spec import Shape
from model.weights import Array, StoredWeights

Float = npt.NDArray[np.float32]

GROUP = 32
#: What the largest number may be of groups that are int4, after -8.
OTHERS = (7, -7, 6, -6, 5, -5, 4, -4, 3, -3, 2, -2, 1, -1)


def to_int4(matrix: Float) -> Float:
    """The numbers that a runtime multiplies with, in float32 steps as it takes them."""
    rows, columns = matrix.shape
    padded = np.zeros((rows, -(-columns // GROUP) * GROUP), np.float32)
    padded[:, :columns] = matrix
    groups = padded.reshape(-1, GROUP)
    scale = scales(groups)
    return (codes(groups, scale) * scale[:, None]).reshape(padded.shape)[:, :columns]


def scales(groups: Float) -> Float:
    """[groups], exact in float16: with them the largest number is -8, or all numbers are exact."""
    largest = groups[np.arange(len(groups)), np.abs(groups).argmax(axis=1)]
    found = to_half(largest / np.float32(-8))
    for to in OTHERS:
        other = to_half(largest / np.float32(to))
        found = np.where(are_exact(groups, other), other, found)
    return found


def to_half(numbers: Float) -> Float:
    return numbers.astype(np.float16).astype(np.float32)


def are_exact(groups: Float, scale: Float) -> npt.NDArray[np.bool_]:
    exact: npt.NDArray[np.bool_] = (codes(groups, scale) * scale[:, None] == groups).all(axis=1)
    return exact


def codes(groups: Float, scale: Float) -> Float:
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    steps: Float = np.rint(np.clip(groups * inverse[:, None], -8, 7)).astype(np.float32)
    return steps


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
        return "BF16" if name in self._others else "Q4_0"
