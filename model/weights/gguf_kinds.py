"""The types of a GGUF file's tensors, and their numbers as float32.

The package ``gguf`` unpacks quantised blocks. It imports slowly, so it is imported when the first
block is read, and the sizes of blocks are defined here; a test compares them with the package's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.weights import Array


@dataclass(frozen=True)
class GgufKind:
    """How numbers are stored: blocks of ``block`` numbers in ``num_bytes`` bytes."""

    name: str
    block: int
    num_bytes: int


#: Codes of tensor types. Those of one number in a block are floating point; the rest is quantised.
#: NVFP4 has scales in other tensors, and nothing unpacks Q1_0, Q8_1 and Q8_K.
KINDS = {
    0: GgufKind("F32", 1, 4),
    1: GgufKind("F16", 1, 2),
    2: GgufKind("Q4_0", 32, 18),
    3: GgufKind("Q4_1", 32, 20),
    6: GgufKind("Q5_0", 32, 22),
    7: GgufKind("Q5_1", 32, 24),
    8: GgufKind("Q8_0", 32, 34),
    10: GgufKind("Q2_K", 256, 84),
    11: GgufKind("Q3_K", 256, 110),
    12: GgufKind("Q4_K", 256, 144),
    13: GgufKind("Q5_K", 256, 176),
    14: GgufKind("Q6_K", 256, 210),
    16: GgufKind("IQ2_XXS", 256, 66),
    17: GgufKind("IQ2_XS", 256, 74),
    18: GgufKind("IQ3_XXS", 256, 98),
    19: GgufKind("IQ1_S", 256, 50),
    20: GgufKind("IQ4_NL", 32, 18),
    21: GgufKind("IQ3_S", 256, 110),
    22: GgufKind("IQ2_S", 256, 82),
    23: GgufKind("IQ4_XS", 256, 136),
    29: GgufKind("IQ1_M", 256, 56),
    30: GgufKind("BF16", 1, 2),
    34: GgufKind("TQ1_0", 256, 54),
    35: GgufKind("TQ2_0", 256, 66),
    39: GgufKind("MXFP4", 32, 17),
}
QUANTIZED = frozenset(kind.name for kind in KINDS.values() if kind.block > 1)
#: Where a block has its float16.
SCALES = {
    "Q4_1": slice(0, 4),
    "Q8_0": slice(0, 2),
    "Q4_K": slice(0, 4),
    "Q5_K": slice(0, 4),
    "Q6_K": slice(208, 210),
    "IQ4_XS": slice(0, 2),
    "IQ4_NL": slice(0, 2),
}
#: What numpy reads the others as.
NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
#: Numbers that are unpacked at a time: a block's intermediate results stay in the cache.
_CHUNK = 1 << 18


def unpacked(rows: Array, kind: GgufKind, columns: int) -> Array:
    """Rows of blocks as float32 [rows, columns], a part at a time."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    values = np.empty((len(rows), columns), np.float32)
    step = max(1, _CHUNK // columns)
    with np.errstate(all="ignore"):  # a scale may be any bits; what is not finite is found later
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            values[at : at + step] = dequantize(part, GGMLQuantizationType[kind.name])
    return values


def block_scales(blocks: Array, kind: str) -> Array:
    """What the numbers of blocks of `SCALES` are multiples of, as float32: [rows, scales]."""
    num_bytes = next(each.num_bytes for each in KINDS.values() if each.name == kind)
    each = blocks.reshape(len(blocks), -1, num_bytes)[..., SCALES[kind]].copy()
    return each.view(np.float16).reshape(len(blocks), -1).astype(np.float32)


def kind_name(code: int) -> str:
    """What the format calls a type that is not supported."""
    from gguf.constants import GGMLQuantizationType

    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    return known.get(code, str(code))
