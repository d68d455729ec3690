"""int4 matrices: codes of -8 to 7 and a float16 scale for each 32 numbers of a row.

    w[i, j] ~ codes[i, j] * scales[i, j // 32]

In a file two codes plus 8 share a byte, column 2 j in the lower half. The numbers of such a matrix
are exact in float32, and whatever rounds them to int4 again, as the native runtime does when it
packs, finds the same ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from model.weights import Array

GROUP = 32
#: What the largest number of a group may become where all of the group are int4 already.
_OTHERS = (7, -7, 6, -6, 5, -5, 4, -4, 3, -3, 2, -2, 1, -1)

Float = npt.NDArray[np.float32]


class Int4(NamedTuple):
    """A matrix [n, k]: ``codes`` [n, k] int8 and ``scales`` [n, ceil(k / 32)] float16."""

    codes: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float16]

    def numbers(self) -> Float:
        """What the codes stand for, [n, k]."""
        return self.codes * _wide(self.scales, self.codes.shape[1])

    def packed(self) -> npt.NDArray[np.uint8]:
        """Two codes in a byte, [n, k / 2]; k must be even."""
        halves = (self.codes + 8).astype(np.uint8)
        pairs: npt.NDArray[np.uint8] = halves[:, ::2] | np.left_shift(halves[:, 1::2], np.uint8(4))
        return pairs

    def q4_0(self) -> npt.NDArray[np.uint8]:
        """The blocks of GGUF's Q4_0, [n, k / 32 * 18]; 32 must divide k.

        A block is the scale and 16 bytes, with code i plus 8 in the lower half of byte i and code
        i + 16 in the upper half.
        """
        rows, groups = self.scales.shape
        halves = (self.codes + 8).astype(np.uint8).reshape(rows, groups, 2, GROUP // 2)
        pairs = halves[:, :, 0] | np.left_shift(halves[:, :, 1], np.uint8(4))
        scales = self.scales.view(np.uint8).reshape(rows, groups, 2)
        blocks: npt.NDArray[np.uint8] = np.concatenate([scales, pairs], axis=-1)
        return blocks.reshape(rows, -1)


def unpacked(packed: Array, scales: Array) -> Float:
    """The numbers of `Int4.packed` rows [n, k / 2] and their scales, [n, k]."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), 2 * packed.shape[1])
    return (codes.astype(np.float32) - 8) * _wide(scales, codes.shape[1])


def num_groups(columns: int) -> int:
    """Groups of a row, of which the last one may be shorter."""
    return -(-columns // GROUP)


def rounded(matrix: Float) -> Int4:
    """A finite matrix as the native runtime rounds it when it packs float32 for int4.

    The number of the largest size in a group becomes -8, or another integer with which all numbers
    of the group are codes times a scale already.
    """
    rows, columns = matrix.shape
    filled = np.zeros((rows, num_groups(columns) * GROUP), np.float32)
    filled[:, :columns] = matrix
    groups = filled.reshape(-1, GROUP)
    scales = _scales(groups)
    codes = codes_of(groups, scales[:, None]).reshape(filled.shape)[:, :columns]
    return Int4(codes.astype(np.int8), scales.astype(np.float16).reshape(rows, -1))


def codes_of(numbers: Array, scales: Array) -> Array:
    """Finite numbers as the nearest codes, in their floating point type; 0 where the scale is."""
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    codes: Array = np.rint(np.clip(numbers * inverse, -8, 7))
    return codes


def to_float16(scales: Array) -> Array:
    """Rounded to what a scale can be, in the same type."""
    return scales.astype(np.float16).astype(scales.dtype)


def largest(groups: Array) -> Array:
    """The number of the largest size in each group [..., 32], the first of several."""
    places = np.abs(groups).argmax(axis=-1)
    return np.take_along_axis(groups, places[..., None], axis=-1)[..., 0]


def _scales(groups: Float) -> Float:
    most = largest(groups)
    found = to_float16(most / np.float32(-8))
    for code in _OTHERS:
        other = to_float16(most / np.float32(code))
        exact = (codes_of(groups, other[:, None]) * other[:, None] == groups).all(axis=1)
        found = np.where(exact, other, found)
    return found


def _wide(scales: Array, columns: int) -> Float:
    """The scale of each number, float32."""
    return np.repeat(scales.astype(np.float32), GROUP, axis=1)[:, :columns]
