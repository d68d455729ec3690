"""GGUF files of RWKV-7 as llama.cpp's converter writes them, made with the package ``gguf``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

from model.tokenizer import Tokenizer
from tests.rwkv7 import Published, Shape

Tensors = dict[str, npt.NDArray[np.float32]]
#: Blocks of a type by name.
Raw = dict[str, tuple[npt.NDArray[np.uint8], GGMLQuantizationType]]
#: Changes a writer before the tensors are added.
Fill = Callable[[GGUFWriter], None]

_PARTS = {"ln1": "attn_norm", "ln2": "attn_norm_2", "att.ln_x": "time_mix_ln"}


def gguf_tensors(weights: Published) -> Tensors:
    """The tensors of a native file by their names in GGUF, in its orientation."""
    layers = 1 + max(int(key.split(".")[1]) for key in weights if key.startswith("blocks."))
    whole = {"emb": "token_embd", "blocks.0.ln0": "token_embd_norm", "ln_out": "output_norm"}
    tensors: Tensors = {"output.weight": weights["head.weight"].numpy()}
    for key, name in whole.items():
        for kind in ("weight", "bias"):
            if f"{key}.{kind}" in weights:
                tensors[f"{name}.{kind}"] = weights[f"{key}.{kind}"].numpy()
    for layer in range(layers):
        ours = {
            key.removeprefix(f"blocks.{layer}."): tensor.numpy()
            for key, tensor in weights.items()
            if key.startswith(f"blocks.{layer}.") and ".ln0." not in key
        }
        tensors |= {f"blk.{layer}.{name}": data for name, data in _block(ours, layer).items()}
    return tensors


def _block(ours: Tensors, layer: int) -> Tensors:
    block: Tensors = {"channel_mix_lerp_k.weight": ours["ffn.x_k"].squeeze()}
    for key, name in _PARTS.items():
        for kind in ("weight", "bias"):
            block[f"{name}.{kind}"] = ours[f"{key}.{kind}"]
    for name in ("receptance", "key", "value", "output"):
        block[f"time_mix_{name}.weight"] = ours[f"att.{name}.weight"]
    for name in ("key", "value"):
        block[f"channel_mix_{name}.weight"] = ours[f"ffn.{name}.weight"]
    for name in ("k_k", "k_a", "r_k"):
        block[f"time_mix_{name}.weight"] = ours[f"att.{name}"].flatten()
    for name in ("w0", "a0", "v0"):
        if f"att.{name}" in ours:
            block[f"time_mix_{name}.weight"] = ours[f"att.{name}"].squeeze()
    for name in ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2"):
        if f"att.{name}" in ours:
            block[f"time_mix_{name}.weight"] = np.ascontiguousarray(ours[f"att.{name}"].T)
    if layer == 0:
        for digit in "012":
            block[f"time_mix_v{digit}.weight"] = block[f"time_mix_a{digit}.weight"]
    rows = [ours[f"att.x_{letter}"] for letter in "rwkvag"]
    block["time_mix_lerp_fused.weight"] = np.stack(rows)
    return block


def finish(writer: GGUFWriter) -> None:
    """Writes what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    shape: Shape,
    tensors: Tensors,
    kind: str = "F32",
    fill: Fill | None = None,
    change: dict[str, Any] | None = None,
    raw: Raw | None = None,
    split: int = 0,
) -> Path:
    """The file; matrices as ``kind``, the rest as F32. ``fill`` adds a tokenizer.

    ``change`` has other values for the keys ``rwkv7.*``; None leaves a key out. ``raw`` has
    tensors that are blocks already. ``split`` writes parts of so many tensors; the first is
    returned.
    """
    writer = GGUFWriter(path, "rwkv7", split_max_tensors=split)
    decay, rate, value, gate = shape.ranks
    values: dict[str, Any] = {
        "context_length": 1 << 20,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "attention.layer_norm_epsilon": 1e-5,
        "wkv.head_size": shape.head_dim,
        "attention.decay_lora_rank": decay,
        "attention.iclr_lora_rank": rate,
        "attention.value_residual_mix_lora_rank": value,
        "attention.gate_lora_rank": gate,
        "feed_forward_length": shape.inner,
        "attention.head_count": 0,
        **(change or {}),
    }
    for key, number in values.items():
        if isinstance(number, int):
            writer.add_uint32(f"rwkv7.{key}", number)
        elif isinstance(number, float):
            writer.add_float32(f"rwkv7.{key}", number)
        elif isinstance(number, str):
            writer.add_string(f"rwkv7.{key}", number)
    if fill is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        fill(writer)
    for name, (blocks, type_) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=type_)
    for name, data in tensors.items():
        if raw and name in raw:
            continue
        fits = data.ndim == 2 and "_norm" not in name and name[-9:-8] not in "wavg"
        type_ = GGMLQuantizationType[kind if fits and _has_blocks(data, kind) else "F32"]
        writer.add_tensor(name, quantize(np.ascontiguousarray(data), type_), raw_dtype=type_)
    finish(writer)
    return writer.format_shard_names(path)[0]


def _has_blocks(data: npt.NDArray[Any], kind: str) -> bool:
    return not kind.startswith("Q") or data.shape[-1] % 32 == 0


def world_vocabulary(tokens: dict[int, bytes], size: int) -> Fill:
    """RWKV's vocabulary as the converter writes it: padding has the type UNUSED."""

    def fill(writer: GGUFWriter) -> None:
        names = [b"<s>"] + [repr(tokens.get(id, b""))[2:-1].encode() for id in range(1, size)]
        types = [TokenType.CONTROL] + [
            TokenType.NORMAL if id in tokens else TokenType.UNUSED for id in range(1, size)
        ]
        names = [name or b"[PAD%d]" % id for id, name in enumerate(names)]
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list(names)
        writer.add_token_types(types)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_eot_token_id(261)
        writer.add_chat_template("rwkv-world")

    return fill


def byte_level_vocabulary(tokenizer: Tokenizer, size: int) -> Fill:
    """A byte-level BPE that cuts texts as GPT-2 does, padded to ``size`` ids."""
    values = json.loads(tokenizer.content)["model"]

    def fill(writer: GGUFWriter) -> None:
        ids = {id: token for token, id in values["vocab"].items()}
        special = set(tokenizer.special_ids.values())
        types = [
            TokenType.CONTROL
            if id in special
            else TokenType.NORMAL
            if id in ids
            else TokenType.UNUSED
            for id in range(size)
        ]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([ids.get(id, f"[PAD{id}]") for id in range(size)])
        writer.add_token_types(types)
        writer.add_token_merges([" ".join(merge) for merge in values["merges"]])
        writer.add_bos_token_id(tokenizer.eos_token_id)
        writer.add_eos_token_id(tokenizer.eos_token_id)

    return fill
