"""Blocks of GGUF's Q4_K and Q6_K with random bits, and weights that have some matrices in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from model.tensor_spec import Shape
from model.weights import Array, StoredWeights

Blocks = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float32]

BLOCK = 256


def q4k_blocks(rows: int, columns: int, seed: int = 0) -> Blocks:
    """[rows, bytes]: numbers with a mean near zero and a deviation near ``columns ** -0.5``."""
    chance = np.random.default_rng(seed)
    blocks = chance.integers(0, 256, (rows, columns // BLOCK, 144)).astype(np.uint8)
    step = chance.uniform(0.5, 1.5, blocks.shape[:2]) * columns**-0.5 / 250
    for at, scale in ((0, step), (2, 7.5 * step)):
        blocks[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def q6k_blocks(rows: int, columns: int, seed: int = 0) -> Blocks:
    """The same of Q6_K, whose scale of a block is at its end."""
    chance = np.random.default_rng(seed)
    blocks = chance.integers(0, 256, (rows, columns // BLOCK, 210)).astype(np.uint8)
    step = chance.uniform(0.5, 1.5, blocks.shape[:2]) * columns**-0.5 / 1300
    blocks[..., 208:] = step.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def q4k_numbers(blocks: Blocks) -> Float:
    """What they stand for, [rows, columns]."""
    with np.errstate(all="ignore"):  # a test's scale may not be finite
        return np.asarray(dequantize(blocks, GGMLQuantizationType.Q4_K), np.float32)


class Q4KWeights(StoredWeights):
    """Weights as a file of Q4_K gives them: ``blocks`` by name, all others in more bits."""

    def __init__(self, weights: Mapping[str, Float], blocks: Mapping[str, Blocks]) -> None:
        self.numbers = {**weights, **{name: q4k_numbers(each) for name, each in blocks.items()}}
        self._blocks = blocks

    def __getitem__(self, name: str) -> Array:
        return self.numbers[name]

    def __contains__(self, name: object) -> bool:
        return name in self.numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def shape(self, name: str) -> Shape:
        return self.numbers[name].shape

    def is_float(self, name: str) -> bool:
        return True

    @property
    def stored_dtype(self) -> str:
        return "Q4_K"

    def dtype_of(self, name: str) -> str:
        return "Q4_K" if name in self._blocks else "Q6_K"

    def block_kind(self, name: str) -> str | None:
        return self.dtype_of(name)

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        rows: Array = self._blocks[name][begin:end]
        return rows
