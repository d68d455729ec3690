"""RWKV-7 in GGUF, with the keys, orientations and types of llama.cpp's converter.

Vectors, norms, the token shift and the low-rank maps of the decay stay float32; what remains is
as asked, or float16 where its rows do not divide into blocks. Tensors are written one at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFType, GGUFWriter, LlamaFileType
from gguf.quants import quant_shape_to_byte_shape, quantize

from model.architectures.rwkv7.chat import NAME, TEMPLATE
from model.architectures.rwkv7.config import Rwkv7Config
from model.chat.template import PLAIN
from model.checkpoint import GGUF_TEMPLATE, Checkpoint
from model.export.gguf_vocabulary import vocabulary
from model.export.rwkv7_tensors import config_of, published, refuse_others
from model.foreign.rwkv7_gguf import BOS, EOS, GROUP_NORM_EPS
from model.foreign.rwkv7_names import GGUF, parts_of
from model.tensor_spec import Shape
from model.weights import Array

#: What llama.cpp's converter writes for a model whose context has no end.
CONTEXT_LENGTH = 1 << 20
KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
_STAY_FLOAT32 = re.compile(r"_norm\.weight$|\.bias$|\.time_mix_w[12]\.|\.time_mix_lerp_fused\.")


def write_gguf(path: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The file, with the tokenizer and the chat template inside.

    Raises `CheckpointError` or `TokenizerError` where the format has no place for the model.
    """
    config = config_of(checkpoint)
    refuse_others("GGUF", "group_norm_eps", GROUP_NORM_EPS, config.group_norm_eps)
    writer = GGUFWriter(path, "rwkv7")
    _add_metadata(writer, checkpoint, dtype)
    shapes = dict(_shapes(config))
    kinds = {key: _kind(key, shape, KINDS[dtype]) for key, shape in shapes.items()}
    for key, shape in shapes.items():
        _add_info(writer, key, shape, kinds[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for key, tensor in _tensors(checkpoint):
        kind = kinds[key]
        writer.write_tensor_data(np.ascontiguousarray(quantize(tensor, kind)))
    writer.close()


def _add_metadata(writer: GGUFWriter, checkpoint: Checkpoint, dtype: str) -> None:
    config = config_of(checkpoint)
    writer.add_type(GGUFType.MODEL)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_layer_norm_eps(config.norm_eps)
    writer.add_wkv_head_size(config.head_dim)
    writer.add_decay_lora_rank(config.decay_rank)
    writer.add_iclr_lora_rank(config.rate_rank)
    writer.add_value_residual_mix_lora_rank(config.value_rank)
    writer.add_gate_lora_rank(config.gate_rank)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(0)
    kind = KINDS[dtype]
    writer.add_file_type(LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    values = vocabulary(checkpoint.tokenizer, config.vocab_size)
    values |= {BOS: config.bos_token_id, EOS: config.eos_token_id}
    template, codec = checkpoint.chat_template.source, values["tokenizer.ggml.model"]
    if template == TEMPLATE or (template == PLAIN and codec == "rwkv"):
        values[GGUF_TEMPLATE] = NAME  # as the converter; not every reader knows all of Jinja
    elif template != PLAIN:
        values[GGUF_TEMPLATE] = template
    for key, value in values.items():
        _add(writer, key, value)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _shapes(config: Rwkv7Config) -> Iterator[tuple[str, Shape]]:
    """The shapes of `_tensors`, in its order."""
    wanted = config.weight_shapes()
    for ours, part in parts_of(config, GGUF).items():
        yield from _published(part.keys[0], wanted[ours])


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Array]]:
    for key, tensor in published(checkpoint, GGUF):
        for name, shape in _published(key, tensor.shape):
            yield name, tensor.reshape(shape)


def _published(key: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    """A tensor's key and shape as the converter has them.

    The first layer gets copies of ``time_mix_a*`` as ``time_mix_v*``, which llama.cpp wants.
    """
    if key.endswith(".time_mix_lerp_fused.weight"):
        shape = (shape[0], 1, 1, shape[1])
    elif key.endswith(".time_mix_r_k.weight"):
        shape = (math.prod(shape),)
    yield key, shape
    if re.match(r"blk\.0\.time_mix_a\d", key):
        yield key.replace("time_mix_a", "time_mix_v"), shape


def _kind(key: str, shape: Shape, wanted: str) -> GGMLQuantizationType:
    if len(shape) == 1 or _STAY_FLOAT32.search(key):
        return GGMLQuantizationType.F32
    if wanted == "Q8_0" and shape[-1] % 32:
        return GGMLQuantizationType.F16
    return GGMLQuantizationType[wanted]


def _add_info(writer: GGUFWriter, key: str, shape: Shape, kind: GGMLQuantizationType) -> None:
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        dtype = np.dtype(np.float32 if kind == GGMLQuantizationType.F32 else np.float16)
    else:  # blocks, which the package counts in bytes
        dtype, shape = np.dtype(np.uint8), tuple(quant_shape_to_byte_shape(shape, kind))
    num_bytes = math.prod(shape) * dtype.itemsize
    writer.add_tensor_info(key, shape, dtype, num_bytes, raw_dtype=kind)
