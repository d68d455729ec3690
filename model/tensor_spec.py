"""The shape and dtype of a tensor, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

Shape = tuple[int, ...]
DType = Literal["float32", "float64", "int64"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape (without batch) and dtype of one tensor of a layer's state."""

    shape: Shape
    dtype: DType = "float32"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize
