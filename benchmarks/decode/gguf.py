"""Random models for llama.cpp, written with `gguf`: a Llama or an RWKV-7 of a given size."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize

from benchmarks.decode.shapes import Size, peer_tensors, rwkv7_ranks
from benchmarks.process import make_once

#: Which file types correspond to ours of that name; the faster one is what we are compared with.
FILE_TYPES = {
    "float32": ("F32",),
    "bfloat16": ("BF16", "F16"),
    "int8": ("Q8_0",),
    "int4": ("Q4_0",),
}

CONTEXT_LENGTH = 1 << 20
NORM_EPS = 1e-5


def gguf_file(
    folder: Path, size: Size, architecture: str, file_type: str, tokenizer: Path | None = None
) -> Path:
    """Writes the model into ``folder`` unless it is there; random weights, the same every time.

    ``tokenizer`` is a byte-level ``tokenizer.json`` that goes into the file; without one the
    model has ids and no text.
    """
    name = f"{size.name}-{architecture}-{file_type}{'-text' if tokenizer else ''}.gguf"
    kind = f"{'ALL' if file_type == 'F32' else 'MOSTLY'}_{file_type}"

    def write(path: Path) -> None:
        writer = GGUFWriter(path, architecture)
        _add_shape(writer, size, architecture)
        writer.add_file_type(LlamaFileType[kind])
        _add_tokenizer(writer, size, tokenizer)
        _add_tensors(writer, size, architecture, GGMLQuantizationType[file_type])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return make_once(folder / name, write)


def _add_shape(writer: GGUFWriter, size: Size, architecture: str) -> None:
    tensors = peer_tensors(size, architecture)
    writer.add_vocab_size(size.vocab_size)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(size.hidden_size)
    writer.add_block_count(size.num_layers)
    if architecture == "llama":
        writer.add_feed_forward_length(tensors["blk.0.ffn_up.weight"][0])
        writer.add_head_count(size.num_heads)
        writer.add_head_count_kv(size.num_heads)
        writer.add_layer_norm_rms_eps(NORM_EPS)
        writer.add_rope_dimension_count(size.head_dim)
        return
    ranks = rwkv7_ranks(size.hidden_size)
    writer.add_feed_forward_length(tensors["blk.0.channel_mix_key.weight"][0])
    writer.add_head_count(0)
    writer.add_layer_norm_eps(NORM_EPS)
    writer.add_wkv_head_size(size.head_dim)
    writer.add_decay_lora_rank(ranks["w"])
    writer.add_iclr_lora_rank(ranks["a"])
    writer.add_value_residual_mix_lora_rank(ranks["v"])
    writer.add_gate_lora_rank(ranks["g"])


def _add_tokenizer(writer: GGUFWriter, size: Size, tokenizer: Path | None) -> None:
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return
    values: dict[str, Any] = json.loads(tokenizer.read_text(encoding="utf-8"))
    ids = sorted(values["model"]["vocab"].items(), key=lambda item: item[1])
    special = {added["id"] for added in values["added_tokens"]}
    kinds = [TokenType.CONTROL if id in special else TokenType.NORMAL for _, id in ids]
    assert len(ids) == size.vocab_size, (len(ids), size.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in ids])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in values["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _add_tensors(
    writer: GGUFWriter, size: Size, architecture: str, kind: GGMLQuantizationType
) -> None:
    """Matrices as ``kind``, the rest in float32: norms of one, normal weights."""
    draw = np.random.default_rng(0)
    for name, shape in peer_tensors(size, architecture).items():
        is_matrix = len(shape) == 2
        if "norm" in name or "_ln" in name:
            values = np.full(shape, float(name.endswith("weight")), np.float32)
        else:
            values = draw.standard_normal(shape, np.float32)
            values *= 1 / math.sqrt(shape[-1]) if is_matrix else 0.1
        raw = kind if is_matrix else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, raw), raw_dtype=raw)
