"""Products of which one side is a single row, as the step forms need them.

A matrix library may add the terms of such a product in an order that depends on the
place of a sequence in the batch. Multiplied and summed, they have one order.
"""

from __future__ import annotations

from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for ``a`` [..., R, K] and ``b`` [..., K, V]; multiplied and summed where R is 1."""
    if a.shape[-2] > 1:
        return a @ b
    return (a.transpose(-1, -2) * b).sum(dim=-2, keepdim=True)
