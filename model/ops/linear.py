"""Several matrices that read the same input, as one product."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class FusedLinear(nn.Linear):
    """A linear layer whose output is that of several, one after the other.

    ``parts`` are their output widths. One product is faster than several; an optimizer that
    looks at a matrix as a whole (`model.training.optimizer`) must look at each of them.
    """

    def __init__(self, in_features: int, parts: Sequence[int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts), bias=bias)
        self.parts = tuple(parts)
