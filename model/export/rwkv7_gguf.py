"""RWKV-7 in GGUF, with the keys, orientations and types of llama.cpp's converter.

Vectors, norms, the token shift and the low-rank maps of the decay stay float32; what remains is
as asked, or float16 where its rows do not divide into blocks. Tensors are written one at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from gguf import GGUFType, GGUFWriter

from model.chat.template import PLAIN
from model.checkpoint import GGUF_TEMPLATE, Checkpoint
from model.export.gguf_tensors import Planned, add_dtype, add_values, write_tensors
from model.export.gguf_vocabulary import vocabulary
from model.export.rwkv7_tensors import config_of, published, refuse_others
from model.families.rwkv7.chat import NAME, TEMPLATE
from model.families.rwkv7.config import Rwkv7Config
from model.families.rwkv7.gguf import BOS, EOS, GROUP_NORM_EPS
from model.families.rwkv7.read import GGUF, parts_of
from model.tensor_spec import Shape
from model.weights import Array

#: What llama.cpp's converter writes for a model whose context has no end.
CONTEXT_LENGTH = 1 << 20
_STAY_FLOAT32 = re.compile(r"_norm\.weight$|\.bias$|\.time_mix_w[12]\.|\.time_mix_lerp_fused\.")


def write_gguf(path: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The file, with the tokenizer and the chat template inside.

    Raises `CheckpointError` or `TokenizerError` where the format has no place for the model.
    """
    config = config_of(checkpoint)
    refuse_others("GGUF", "group_norm_eps", GROUP_NORM_EPS, config.group_norm_eps)
    writer = GGUFWriter(path, "rwkv7")
    _add_metadata(writer, checkpoint, dtype)
    tensors = [
        Planned(key, shape, _STAY_FLOAT32.search(key) is not None) for key, shape in _shapes(config)
    ]
    write_tensors(writer, tensors, _tensors(checkpoint), checkpoint, dtype)


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
    add_dtype(writer, dtype)
    values = vocabulary(checkpoint.tokenizer, config.vocab_size)
    values |= {BOS: config.bos_token_id, EOS: config.eos_token_id}
    template, codec = checkpoint.chat_template.source, values["tokenizer.ggml.model"]
    if template == TEMPLATE or (template == PLAIN and codec == "rwkv"):
        values[GGUF_TEMPLATE] = NAME  # as the converter; not every reader knows all of Jinja
    elif template != PLAIN:
        values[GGUF_TEMPLATE] = template
    add_values(writer, values)


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
