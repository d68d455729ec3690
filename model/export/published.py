"""What the writers share: weights as published files have them, Hugging Face folders, GGUF files.

Keys and forms reverse `model.foreign.weights`, but for halves and factors.

In GGUF vectors stay float32, and what a family says; what remains is as asked, or float16 where its
rows do not divide into blocks. Q4_0 of an int4 checkpoint has its matrices number by number, and
what it has in int8 as Q8_0. Tensors are written one at a time. The vocabulary is the reverse of
`model.tokenization.gguf`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFType, GGUFWriter, LlamaFileType
from gguf.quants import quant_shape_to_byte_shape, quantize
from tokenizers import Tokenizer as Backend
from tokenizers import models

from model.architectures.hybrid import BoundedConfig
from model.chat import PLAIN, TOKENIZER_CONFIG
from model.checkpoint import GGUF_TEMPLATE, Checkpoint, CheckpointError, save_tokenizer
from model.checkpoint_files import CONFIG
from model.foreign.gguf import BOS, EOS
from model.foreign.weights import HALVES, Part
from model.tensor_spec import Shape
from model.tokenization import world
from model.tokenization.base import TokenizerError
from model.tokenization.gguf import (
    CONTROL,
    CUTS,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    escaped,
    read_gguf_codec,
)
from model.tokenizer import Tokenizer
from model.weights import WEIGHTS, Array, StoredWeights
from model.weights.int4 import rounded

if TYPE_CHECKING:
    import torch


def published(
    weights: Mapping[str, Array],
    parts: Mapping[str, Part],
    shape_of: Callable[[str, Shape], Shape] = lambda name, shape: shape,
) -> Iterator[tuple[str, Array]]:
    """The tensors by the keys of ``parts``, float32, each read when it is its turn.

    ``shape_of`` has the shape in the file, by our name and shape.
    """
    for ours, part in parts.items():
        assert part.form not in HALVES and part.factor == 1.0, part
        tensor = _stored(np.asarray(weights[ours], np.float32), part.form)
        yield part.keys[0], tensor.reshape(shape_of(ours, tensor.shape))


def _stored(tensor: Array, form: str) -> Array:
    if form == "log_negative":
        return -np.exp(tensor)
    return tensor - np.float32(1) if form == "plus_one" else tensor


def with_middle_axis(name: str, shape: Shape) -> Shape:
    """Folders have a convolution's weight as [C, 1, W]."""
    return (shape[0], 1, shape[1]) if name.endswith(".conv") else shape


def in_pairs(tensors: Iterator[tuple[str, Array]], head_dim: int) -> Iterator[tuple[str, Array]]:
    """With the rows of q and k that turn together next to each other."""
    for key, tensor in tensors:
        if ".attn_q." in key or ".attn_k." in key:
            halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        yield key, tensor


def refuse_others(form: str, name: str, wanted: float, found: float) -> None:
    """Raises `CheckpointError` where a value is not the one that a format implies."""
    if not math.isclose(found, wanted, rel_tol=1e-6):
        raise CheckpointError(f"{form} implies {name} {wanted:g}, the model has {found:g}")


def write_folder(
    folder: Path,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Array]],
    dtype: str,
) -> None:
    """The folder; ``config`` and the keys of ``tensors`` are theirs. Raises OSError."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(of_dtype(tensors, dtype), folder / WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / CONFIG, config)
    save_tokenizer(folder, checkpoint.tokenizer)
    template = checkpoint.chat_template
    settings: dict[str, Any] = dict(template.special_tokens)
    if template.source != PLAIN:
        settings["chat_template"] = template.source
    if template.tool_use is not None:
        named = {"default": template.source, "tool_use": template.tool_use}
        settings["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    _write_json(folder / TOKENIZER_CONFIG, settings)


def of_dtype(tensors: Iterable[tuple[str, Array]], dtype: str) -> dict[str, torch.Tensor]:
    """As torch has them, in the type of that name."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return {key: torch.from_numpy(np.array(tensor, order="C")).to(kind) for key, tensor in tensors}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


#: The embedding and the head.
_TABLES = ("token_embd.weight", "output.weight")
GGUF_KINDS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
}


class Planned(NamedTuple):
    """A tensor of the file."""

    key: str
    shape: Shape
    stays_float32: bool = False


def add_dtype(writer: GGUFWriter, dtype: str) -> None:
    """Adds the type of most tensors to the metadata."""
    kind = GGUF_KINDS[dtype]
    writer.add_file_type(LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)


def add_sizes(writer: GGUFWriter, config: BoundedConfig) -> None:
    """Adds the metadata that all families with a bounded past have."""
    writer.add_type(GGUFType.MODEL)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)


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
    weights, kind = checkpoint.weights, GGUF_KINDS[dtype]
    is_int4 = isinstance(weights, StoredWeights) and weights.stored_dtype == "int4"
    tables = "Q8_0" if is_int4 and kind == "Q4_0" else kind
    kinds = {one.key: _gguf_kind(one, tables if one.key in _TABLES else kind) for one in planned}
    for one in planned:
        _add_info(writer, one.key, one.shape, kinds[one.key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for key, tensor in tensors:
        writer.write_tensor_data(np.ascontiguousarray(_gguf_stored(tensor, kinds[key])))
    writer.close()


def _gguf_stored(tensor: Array, kind: GGMLQuantizationType) -> Array:
    """As the file has it; a matrix that is int4 already keeps its numbers as Q4_0."""
    if kind == GGMLQuantizationType.Q4_0 and tensor.ndim == 2:
        found = rounded(np.asarray(tensor, np.float32))
        if np.array_equal(found.numbers(), tensor):
            return found.q4_0()
    blocks: Array = quantize(tensor, kind)
    return blocks


def _gguf_kind(one: Planned, wanted: str) -> GGMLQuantizationType:
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


_VOCABULARY = "tokenizer.ggml."
#: Ends a turn in llama.cpp's chat, where it is a token of its own.
_END_OF_TURN = b"\n\n"


def add_vocabulary(writer: GGUFWriter, checkpoint: Checkpoint) -> None:
    """Adds the tokenizer, the ids that begin and end a text, and the chat template.

    Raises `TokenizerError`.
    """
    config, template = checkpoint.config, checkpoint.chat_template.source
    values = vocabulary(checkpoint.tokenizer, config.vocab_size)
    values |= {BOS: config.bos_token_id, EOS: config.eos_token_id}
    if template != PLAIN:
        values[GGUF_TEMPLATE] = template
    add_values(writer, values)


def vocabulary(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The metadata ``tokenizer.ggml.*`` of a model with ``vocab_size`` ids, padded to it.

    Raises `TokenizerError` for a tokenizer that would not be the same when it is read.
    """
    is_world = tokenizer.file_name == world.FILE
    values = _world(tokenizer, vocab_size) if is_world else _byte_level(tokenizer, vocab_size)
    values = {_VOCABULARY + name: value for name, value in values.items()}
    arrays = {key: value for key, value in values.items() if isinstance(value, list)}
    types = _VOCABULARY + "token_type"
    try:
        read = read_gguf_codec(
            values | {_VOCABULARY + "eos_token_id": tokenizer.eos_token_id},
            arrays | {types: np.array(values[types])},
            vocab_size,
        )
    except TokenizerError as error:
        raise TokenizerError(f"GGUF cannot hold the tokenizer: {error}") from error
    if read is None or read.content() != tokenizer.content:
        raise TokenizerError(
            "GGUF cannot hold the tokenizer: only RWKV's vocabulary, and byte-level BPE that cuts"
            f" texts as {', '.join(CUTS)} and changes nothing else"
        )
    return values


def _world(tokenizer: Tokenizer, size: int) -> dict[str, Any]:
    tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
    tokens += [b""] * (size - len(tokens))
    names = [escaped(token) or b"[PAD%d]" % id for id, token in enumerate(tokens)]
    types = [NORMAL if token else UNUSED for token in tokens]
    values: dict[str, Any] = {
        "model": "rwkv",
        "tokens": [b"<s>", *names[1:]],
        "token_type": [CONTROL, *types[1:]],
    }
    if _END_OF_TURN in tokens:
        values["eot_token_id"] = tokens.index(_END_OF_TURN)
    return values


def _byte_level(tokenizer: Tokenizer, size: int) -> dict[str, Any]:
    values = json.loads(tokenizer.content)
    tokens = [f"[PAD{id}]" for id in range(size)]
    types = [UNUSED] * size
    for token, id in values["model"]["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for added in values["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = values["model"].get("merges", [])
    return {
        "model": "gpt2",
        "pre": _cut_of(values),
        "tokens": [token.encode() for token in tokens],
        "token_type": types,
        "merges": [(m if isinstance(m, str) else " ".join(m)).encode() for m in merges],
        "add_bos_token": False,
    }


def _cut_of(values: dict[str, Any]) -> str:
    """The name of the way in which a ``tokenizer.json`` cuts texts; GPT-2's where it has none."""
    for name, cut in CUTS.items():
        backend = Backend(models.BPE(ignore_merges=cut.whole_words))
        cut.apply(backend)
        made = json.loads(backend.to_str())
        is_same = all(made[part] == values[part] for part in ("normalizer", "pre_tokenizer"))
        whole_words = values["model"].get("ignore_merges", False)
        if is_same and made["model"]["ignore_merges"] == whole_words:
            return name
    return "gpt-2"
