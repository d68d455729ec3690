"""The shape and dtype of a tensor, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Shape = tuple[int, ...]
DType = Literal["float16", "float32", "float64", "int64"]

#: Positions of the past that lie together in the state of an attention layer.
POSITION_BLOCK = 16


@dataclass(frozen=True)
class TensorSpec:
    """Shape (without batch) and dtype of one tensor of a layer's state.

    Where it is ``per_position``, axis 0 counts blocks of `POSITION_BLOCK` positions, and is used
    only as far as the text has come: see `model.state`.
    """

    shape: Shape
    dtype: DType = "float32"
    per_position: bool = field(default=False, repr=False)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize
