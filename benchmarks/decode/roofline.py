"""What the machine allows: bandwidth of a working set, rate of arithmetic, so the time of a step.

    time >= max(bytes moved / bandwidth, operations / rate)

The bandwidth is that of reading a buffer of as many bytes as the step moves, again and again, so
that it lies in the cache or the memory in which the step's weights and states lie too. The rate is
the best that was found in that type or in float32: the native runtime's inner loop on operands in
the nearest cache, and PyTorch's matrix product.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: Bytes of a weight; int8 has scales next to it, which are left out here, in our disfavour. int4
#: has one in 16 bits for 32 weights; what is held in int8 instead is left out too. The last two are
#: llama.cpp's own files of four bits: Q4_0 is int4, Q4_K has as many bytes.
ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "int8": 1,
    "int4": 18 / 32,
    "q4_0": 18 / 32,
    "q4_k_m": 144 / 256,
}
LOGIT_BYTES = 4
SECONDS = 0.05
#: Larger than any cache that a few cores share; a larger one only takes longer to make.
MAX_BUFFER_BYTES = 256 << 20
MATRIX_WIDTH = 1024
WARM_UP_PRODUCTS = 2


def runtime_dtype(dtype: str) -> str:
    """What the native runtime serves weights of one of `ITEM_BYTES` in."""
    return "int4" if dtype.startswith("q4") else dtype


@dataclass(frozen=True)
class Cost:
    """What a step must do at least: bytes that move, and multiplications plus additions."""

    num_bytes: int
    operations: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.operations + other.operations)


def matrix_cost(
    tensors: Mapping[str, tuple[int, ...]],
    item_bytes: float,
    rows: int,
    num_logits: int,
    embedding: str,
) -> Cost:
    """Of the weights: all read once, a row of ``embedding`` for each of ``rows`` tokens.

    Matrices take ``item_bytes`` for a number, vectors 4. ``num_logits`` rows have logits. Where
    the head is the embedding there is no separate matrix, and it counts as read.
    """
    num_bytes, operations = 0.0, 0
    for name, shape in tensors.items():
        if len(shape) != 2:
            num_bytes += 4 * math.prod(shape)
        elif name.startswith(embedding):
            num_bytes += rows * shape[1] * item_bytes
        else:
            is_head = name.startswith(("head", "output.weight"))
            num_bytes += math.prod(shape) * item_bytes
            operations += 2 * math.prod(shape) * (num_logits if is_head else rows)
            num_bytes += LOGIT_BYTES * shape[0] * num_logits if is_head else 0
    return Cost(int(num_bytes), operations)


@dataclass(frozen=True)
class Limit:
    """The least time of a step, and what sets it: "bandwidth" or "arithmetic"."""

    seconds: float
    bound: str
    bytes_per_s: float
    operations_per_s: float

    @classmethod
    def of(cls, cost: Cost, bytes_per_s: float, operations_per_s: float) -> Limit:
        moving, computing = cost.num_bytes / bytes_per_s, cost.operations / operations_per_s
        bound = "bandwidth" if moving >= computing else "arithmetic"
        return cls(max(moving, computing), bound, bytes_per_s, operations_per_s)

    def fraction(self, seconds: float) -> float:
        """How near a step that took ``seconds`` is to the limit; 1 is at it."""
        return self.seconds / seconds


def bandwidth(num_bytes: int, threads: int, seconds: float = SECONDS) -> float:
    """Bytes/s of reading a buffer of ``num_bytes`` over and over, or of memory if it is large."""
    from model.ops.cpu import _native

    return _native.read_bandwidth(min(num_bytes, MAX_BUFFER_BYTES), seconds, threads)


class Rates:
    """Operations/s by type and number of threads: the best that was ever measured."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._best: dict[tuple[str, int], float] = {}

    def of(self, dtype: str, threads: int) -> float:
        """Measures the native loop again, and PyTorch's product when first asked."""
        from model.ops.cpu import _native

        dtype = runtime_dtype(dtype)
        key = (dtype, threads)
        if key not in self._best:
            kinds = {"float32", dtype}
            self._best[key] = max(product_rate(kind, threads, self._seconds) for kind in kinds)
        native = _native.multiply_add_rate(self._seconds, threads, dtype)
        self._best[key] = max(self._best[key], native)
        return self._best[key]


def product_rate(dtype: str, threads: int, seconds: float) -> float:
    """Operations/s of PyTorch's product of two square matrices."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        multiply = _product_of(torch, dtype)
        for _ in range(WARM_UP_PRODUCTS):
            multiply()
        num_products, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds or num_products == 0:
            multiply()
            num_products += 1
    finally:
        torch.set_num_threads(before)
    return 2 * MATRIX_WIDTH**3 * num_products / elapsed


def _product_of(torch: Any, dtype: str) -> Callable[[], object]:
    if dtype in ("int8", "int4"):
        a = torch.randint(-128, 128, (MATRIX_WIDTH, MATRIX_WIDTH), dtype=torch.int8)
        return lambda: torch._int_mm(a, a)
    a = torch.randn(MATRIX_WIDTH, MATRIX_WIDTH).to(getattr(torch, dtype))
    return lambda: a @ a
