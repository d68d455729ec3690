"""RWKV-7 as a native ``.pth`` file, as a folder in the layout of fla-hub, and in GGUF.

A ``.pth`` and a folder hold all tensors in one dtype. A ``.pth`` has nothing but tensors: its
epsilons are those of every published model, and its texts begin and end with id 0. In fla's layout
the epsilon of the group norm is that of the other norms times the head size.

GGUF has the keys, orientations and types of llama.cpp's converter: vectors, norms, the token shift
and the low-rank maps of the decay stay float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFType, GGUFWriter

from model.chat import PLAIN
from model.checkpoint import GGUF_TEMPLATE, Checkpoint, CheckpointError, save_tokenizer
from model.export.published import (
    Planned,
    add_dtype,
    add_values,
    of_dtype,
    refuse_others,
    vocabulary,
    write_folder,
    write_tensors,
)
from model.families.rwkv7.chat import NAME, TEMPLATE
from model.families.rwkv7.config import Rwkv7Config
from model.families.rwkv7.read import (
    BOS,
    EOS,
    FLA,
    GGUF,
    GROUP_NORM_EPS,
    NATIVE,
    Names,
    parts_of,
    time_states,
)
from model.foreign.weights import Part
from model.state import StateLayout
from model.tensor_spec import Shape
from model.weights import Array


def config_of(checkpoint: Checkpoint) -> Rwkv7Config:
    """The config, which is of this family. Raises `CheckpointError` where no format has it."""
    assert isinstance(checkpoint.config, Rwkv7Config), checkpoint.config
    if not checkpoint.config.embedding_norm:
        raise CheckpointError("the embedding is normed already, which no format of RWKV-7 can say")
    return checkpoint.config


def published(checkpoint: Checkpoint, names: Names) -> Iterator[tuple[str, Array]]:
    """The tensors by the keys of ``names``, float32, each read when it is its turn."""
    for ours, part in parts_of(config_of(checkpoint), names).items():
        tensor = np.asarray(checkpoint.weights[ours], np.float32)
        rows = [tensor] if len(part.keys) == 1 else list(tensor)
        for key, row in zip(part.keys, rows, strict=True):
            yield key, _formed(row, part, names)


def _formed(tensor: Array, part: Part, names: Names) -> Array:
    """As the files have it: vectors of a native file, and of a token shift, are [1, 1, D]."""
    if part.form == "transposed":
        return tensor.T
    if part.form == "flat" and (names is NATIVE or len(part.keys) > 1):
        return tensor.reshape(1, 1, -1)
    return tensor


#: Of every native file.
PTH_GROUP_NORM_EPS, PTH_NORM_EPS = 64e-5, 1e-5


def write_pth(path: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The native file, and the tokenizer's next to it. A tuned state stays merged, in float32.

    Raises `CheckpointError` where the file cannot say what the model computes.
    """
    import torch

    config = config_of(checkpoint)
    refuse_others(".pth", "norm_eps", PTH_NORM_EPS, config.norm_eps)
    refuse_others(".pth", "group_norm_eps", PTH_GROUP_NORM_EPS, config.group_norm_eps)
    refuse_others(".pth", "bos_token_id", 0, config.bos_token_id)
    refuse_others(".pth", "eos_token_id", 0, config.eos_token_id)
    tokenizer = checkpoint.tokenizer
    companion = path.with_name(tokenizer.file_name)
    if companion.exists() and companion.read_text(encoding="utf-8") != tokenizer.content:
        raise CheckpointError(f"{companion} is another tokenizer than the model's")
    tensors = of_dtype(published(checkpoint, NATIVE), dtype)
    if checkpoint.tuned_state is not None:
        (*layers,) = StateLayout.of(config).views(checkpoint.tuned_state[None])
        states = time_states([{"S": layer["S"][0]} for layer in layers])
        tensors |= {key: torch.from_numpy(state) for key, state in states.items()}
    torch.save(tensors, path)
    save_tokenizer(path.parent, tokenizer)


def write_hf(folder: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """The folder: config, weights, the tokenizer's file and its settings.

    Raises `CheckpointError` where the config cannot say what the model computes.
    """
    config = config_of(checkpoint)
    wanted = config.norm_eps * config.head_dim
    refuse_others("fla's config", "group_norm_eps", wanted, config.group_norm_eps)
    tensors = published(checkpoint, FLA)
    write_folder(folder, checkpoint, _fla_config(config, dtype), tensors, dtype)


def _fla_config(config: Rwkv7Config, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "attn": None,
        "attn_mode": "chunk",
        "a_low_rank_dim": config.rate_rank,
        "bos_token_id": config.bos_token_id,
        "decay_low_rank_dim": config.decay_rank,
        "eos_token_id": config.eos_token_id,
        "fuse_norm": False,
        "gate_low_rank_dim": config.gate_rank,
        "head_dim": config.head_dim,
        "hidden_act": "sqrelu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "norm_bias": True,
        "norm_eps": config.norm_eps,
        "norm_first": True,
        "num_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "v_low_rank_dim": config.value_rank,
        "value_dim": [config.hidden_size] * config.num_hidden_layers,
        "vocab_size": config.vocab_size,
    }


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
