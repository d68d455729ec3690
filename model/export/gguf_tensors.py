"""The tensors of a GGUF file and the type of each, for any family.

Vectors stay float32, and what a family says; what remains is as asked, or float16 where its rows
do not divide into blocks. Q4_0 of an int4 checkpoint has its matrices number by number, and what
it has in int8 as Q8_0. Tensors are written one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quant_shape_to_byte_shape, quantize

from model.checkpoint import Checkpoint
from model.tensor_spec import Shape
from model.weights import Array, StoredWeights
from model.weights.int4 import rounded

#: The embedding and the head.
_TABLES = ("token_embd.weight", "output.weight")
KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}


class Planned(NamedTuple):
    """A tensor of the file."""

    key: str
    shape: Shape
    stays_float32: bool = False


def add_dtype(writer: GGUFWriter, dtype: str) -> None:
    """Adds the type of most tensors to the metadata."""
    kind = KINDS[dtype]
    writer.add_file_type(LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)


def add_values(writer: GGUFWriter, values: Mapping[str, Any]) -> None:
    """Adds metadata by its keys."""
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def write_tensors(
    writer: GGUFWriter,
    planned: Sequence[Planned],
    tensors: Iterable[tuple[str, Array]],
    checkpoint: Checkpoint,
    dtype: str,
) -> None:
    """Writes the metadata so far, then ``tensors``, which come in the order of ``planned``."""
    weights, kind = checkpoint.weights, KINDS[dtype]
    is_int4 = isinstance(weights, StoredWeights) and weights.stored_dtype == "int4"
    tables = "Q8_0" if is_int4 and kind == "Q4_0" else kind
    kinds = {one.key: _kind(one, tables if one.key in _TABLES else kind) for one in planned}
    for one in planned:
        _add_info(writer, one.key, one.shape, kinds[one.key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for key, tensor in tensors:
        writer.write_tensor_data(np.ascontiguousarray(_stored(tensor, kinds[key])))
    writer.close()


def _stored(tensor: Array, kind: GGMLQuantizationType) -> Array:
    """As the file has it; a matrix that is int4 already keeps its numbers as Q4_0."""
    if kind == GGMLQuantizationType.Q4_0 and tensor.ndim == 2:
        found = rounded(np.asarray(tensor, np.float32))
        if np.array_equal(found.numbers(), tensor):
            return found.q4_0()
    blocks: Array = quantize(tensor, kind)
    return blocks


def _kind(one: Planned, wanted: str) -> GGMLQuantizationType:
    if len(one.shape) == 1 or one.stays_float32:
        return GGMLQuantizationType.F32
    if wanted in ("Q8_0", "Q4_0") and one.shape[-1] % 32:
        return GGMLQuantizationType.F16
    return GGMLQuantizationType[wanted]


def _add_info(writer: GGUFWriter, key: str, shape: Shape, kind: GGMLQuantizationType) -> None:
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        dtype = np.dtype(np.float32 if kind == GGMLQuantizationType.F32 else np.float16)
    else:  # blocks, which the package counts in bytes
        dtype, shape = np.dtype(np.uint8), tuple(quant_shape_to_byte_shape(shape, kind))
    num_bytes = math.prod(shape) * dtype.itemsize
    writer.add_tensor_info(key, shape, dtype, num_bytes, raw_dtype=kind)
