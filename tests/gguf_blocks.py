"""Blocks of GGUF's types with random bits, and weights that have some matrices in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from model.tensor_spec import Shape
from model.weights import Array, StoredWeights

Blocks = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Random:
    """Of a type's blocks with random bits: where the scale is, and the numbers' deviation by it.

    ``bound``, if not zero, is the scale of what is subtracted (added, if it is negative), next to
    the first, relative to it, with which the numbers' mean is near zero.
    """

    at: int
    deviation: float
    bound: float = 0.0


KINDS = {
    "Q4_1": Random(0, 4.6, -7.5),
    "Q8_0": Random(0, 74),
    "Q4_K": Random(0, 250, 7.5),
    "Q5_K": Random(0, 500, 15.5),
    "Q6_K": Random(208, 1300),
    "IQ4_XS": Random(0, 1300),
    "IQ4_NL": Random(0, 70),
}


def size_of(kind: str) -> tuple[int, int]:
    """Numbers of a block, and its bytes."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> Blocks:
    """[rows, bytes]: numbers with a mean near zero and a deviation near ``columns ** -0.5``.

    Scales without bounds may be negative.
    """
    chance, form, (weights, num_bytes) = np.random.default_rng(seed), KINDS[kind], size_of(kind)
    blocks = chance.integers(0, 256, (rows, columns // weights, num_bytes)).astype(np.uint8)
    step = chance.uniform(0.5, 1.5, blocks.shape[:2]) * columns**-0.5 / form.deviation
    if form.bound:
        put_scale(blocks, form.at + 2, form.bound * step)
    else:
        step *= chance.choice([-1, 1], step.shape)
    put_scale(blocks, form.at, step)
    return blocks.reshape(rows, -1)


def put_scale(blocks: Blocks, at: int, scales: npt.NDArray[np.float64]) -> None:
    blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)


def numbers_of(kind: str, blocks: Blocks) -> Float:
    """What they stand for, [rows, columns]."""
    with np.errstate(all="ignore"):  # a test's scale may not be finite
        return np.asarray(dequantize(blocks, GGMLQuantizationType[kind]), np.float32)


class BlockWeights(StoredWeights):
    """Weights as a file mostly of ``kind`` gives them: ``blocks`` by name, others in more bits.

    ``kinds`` are those of blocks of another type. Blocks of Q8_0 lie in a file mostly of Q4_0.
    """

    def __init__(
        self,
        weights: Mapping[str, Float],
        kind: str,
        blocks: Mapping[str, Blocks],
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        self._kind, self._blocks = kind, blocks
        self._kinds = {name: (kinds or {}).get(name, kind) for name in blocks}
        numbers = {name: numbers_of(self._kinds[name], each) for name, each in blocks.items()}
        self.numbers = {**weights, **numbers}

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
        return "Q4_0" if self._kind == "Q8_0" else self._kind

    def dtype_of(self, name: str) -> str:
        return self._kinds.get(name, "BF16")

    def block_kind(self, name: str) -> str | None:
        return self._kinds.get(name)

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        rows: Array = self._blocks[name][begin:end]
        return rows
