"""Reads the source: a Llama in a GGUF file, and its tokenizer.

llama.cpp's converter interleaves the rows of q and k in each head, (0, K/2, 1, K/2 + 1, ...),
because its rotation pairs neighbours; here they go back to halves.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.convert.linearize.network import Llama
from model.convert.linearize.plan import LlamaShape
from model.foreign.gguf_source import EMBEDDING, GgufSource
from model.tokenization.gguf import read_gguf_codec
from model.tokenizer import Tokenizer
from model.weights import Array, CheckpointError
from model.weights.gguf_file import GgufFile


def read_source(path: Path) -> tuple[Llama, Tokenizer]:
    """The model, in float32, and the tokenizer of a GGUF file of the family ``llama``.

    Raises `ConfigError`, `CheckpointError` or `TokenizerError` for what is not supported.
    """
    file = GgufFile(path)
    if (family := file.metadata.get("general.architecture")) != "llama":
        raise CheckpointError(f"{path.name} is of the family {family!r}, not 'llama'")
    shape = _shape(file, path.name)
    model = Llama(shape)
    model.embedding.copy_(_tensor(file[EMBEDDING]))
    model.norm.copy_(_tensor(file["output_norm.weight"]))
    for index in range(shape.num_layers):
        layer, prefix = model.layer(index), f"blk.{index}"
        read = {name: _tensor(file[f"{prefix}.{name}.weight"]) for name in _NAMES}
        q = halves(read["attn_q"], shape.num_heads)
        k = halves(read["attn_k"], shape.num_kv_heads)
        layer.qkv.copy_(torch.cat([q, k, read["attn_v"]]))
        layer.up.copy_(torch.cat([read["ffn_gate"], read["ffn_up"]]))
        layer.out.copy_(read["attn_output"])
        layer.down.copy_(read["ffn_down"])
        layer.attention_norm.copy_(read["attn_norm"])
        layer.mlp_norm.copy_(read["ffn_norm"])
    codec = read_gguf_codec(file.metadata, file.arrays, shape.vocab_size)
    if codec is None:
        raise CheckpointError(f"{path.name} has no tokenizer")
    return model, Tokenizer(codec)


_NAMES = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "attn_norm"),
    *("ffn_gate", "ffn_up", "ffn_down", "ffn_norm"),
)


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(
        np.array(array, dtype=np.float32)
    )  # a copy, since the file is read-only


def _shape(file: GgufFile, name: str) -> LlamaShape:
    source = GgufSource(file, name, "llama")
    num_layers, vocab_size, width = source.sizes(file)
    heads = source.integer("attention.head_count")
    if "output.weight" in file or "rope_freqs.weight" in file:
        raise CheckpointError(f"{name}: a head of its own or scaled rotation is not supported")
    return LlamaShape(
        vocab_size=vocab_size,
        hidden_size=width,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=source.integer("attention.head_count_kv", heads),
        head_dim=source.integer("attention.key_length", width // heads),
        intermediate_size=source.integer("feed_forward_length"),
        rope_theta=source.number("rope.freq_base", 10_000.0),
        rms_norm_eps=source.number("attention.layer_norm_rms_epsilon", 1e-5),
    )


def halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k [heads K, D] from neighbours in pairs to halves in pairs."""
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
