"""The shape and dtype of a tensor, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Shape = tuple[int, ...]
DType = Literal["bfloat16", "float16", "float32", "float64", "int64"]
#: What the sums of a state are stored in: as they are computed, or half as large.
StateDType = Literal["float32", "bfloat16"]
STATE_DTYPES: tuple[StateDType, ...] = ("float32", "bfloat16")

#: Positions of the past that lie together in the state of an attention layer.
POSITION_BLOCK = 16


@dataclass(frozen=True)
class TensorSpec:
    """Shape (without batch) and dtype of one tensor of a layer's state.

    Where it is ``per_position``, axis 0 counts blocks of `POSITION_BLOCK` positions, and is used
    only as far as the text has come: see `model.state`. ``is_sum`` marks the large matrices that
    every token adds to, which may be stored in bfloat16.
    """

    shape: Shape
    dtype: DType = "float32"
    per_position: bool = field(default=False, repr=False)
    is_sum: bool = field(default=False, repr=False)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """That of numpy; bfloat16 it does not have: its 16 bits as an integer."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)
