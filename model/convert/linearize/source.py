"""The source of a conversion: a Llama in any form that loads, in torch, and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.checkpoint import Checkpoint, load_checkpoint, locate
from model.convert.linearize.chats import ChatFormat, chat_format
from model.convert.linearize.network import Llama
from model.convert.linearize.plan import LlamaShape
from model.families.llama.config import LlamaConfig
from model.files import ConfigError
from model.hub.base import file_digest
from model.tokenizer import Tokenizer

#: Fields of a Llama's config that a conversion cannot have, other than as they are by default.
REFUSED = ("unrotated_layers", "out_bias", "windows")


@dataclass(frozen=True)
class Source:
    """``digest`` is SHA-256 of ``path``, if that is a file. ``chat`` may be unknown."""

    path: Path
    digest: str
    config: LlamaConfig
    model: Llama
    tokenizer: Tokenizer
    chat: ChatFormat | None
    checkpoint: Checkpoint


def read_source(name: str | Path, matrices: torch.dtype = torch.float32) -> Source:
    """Reads a GGUF file, a folder or a model of the hub, with its ``matrices`` in that dtype.

    Raises `ConfigError`, `CheckpointError` or `TokenizerError` for what is not supported.
    """
    path = locate(name)
    checkpoint = load_checkpoint(path)
    config = checkpoint.config
    if not isinstance(config, LlamaConfig):
        raise ConfigError(
            f"{path.name} is of the family {config.attention!r}: --to constant is for llama, qwen2"
            " and qwen3"
        )
    for field in REFUSED:
        if value := getattr(config, field):
            raise ConfigError(f"{path.name}: {field} {value!r:.80} is not supported here")
    digest = file_digest(path) if path.is_file() else checkpoint.digest
    model = _model(checkpoint, shape_of(config), matrices)
    chat = chat_format(checkpoint.chat_template.source, checkpoint.tokenizer)
    return Source(path, digest, config, model, checkpoint.tokenizer, chat, checkpoint)


def shape_of(config: LlamaConfig) -> LlamaShape:
    """The sizes of the network."""
    return LlamaShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.norm_eps,
        rope_factors=config.rope_factors,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        tied=config.tied,
    )


#: The parts of a layer by our names of their weights, one below the other.
_PARTS = {
    "attention_norm": ("mixer_norm.weight",),
    "qkv": ("mixer.q.weight", "mixer.k.weight", "mixer.v.weight"),
    "qkv_bias": ("mixer.q.bias", "mixer.k.bias", "mixer.v.bias"),
    "q_norm": ("mixer.q_norm.weight",),
    "k_norm": ("mixer.k_norm.weight",),
    "out": ("mixer.out.weight",),
    "mlp_norm": ("mlp_norm.weight",),
    "up": ("mlp.gate.weight", "mlp.up.weight"),
    "down": ("mlp.down.weight",),
}


def _model(checkpoint: Checkpoint, shape: LlamaShape, matrices: torch.dtype) -> Llama:
    with torch.device("meta"):
        model = Llama(shape)

    def read(*names: str) -> Tensor:
        parts = [np.asarray(checkpoint.weights[name], np.float32) for name in names]
        tensor = torch.from_numpy(np.concatenate(parts))  # a copy: files are read-only
        return tensor.to(matrices) if tensor.dim() == 2 else tensor

    tensors = {"embedding": read("embedding.weight"), "norm": read("norm.weight")}
    if not shape.tied:
        tensors["own_head"] = read("head.weight")
    for index in range(shape.num_layers):
        for name, parameter in model.layer(index).named_parameters():
            tensors[f"layers.{index}.{name}"] = read(
                *(f"blocks.{index}.{part}" for part in _PARTS[name])
            )
            assert tensors[f"layers.{index}.{name}"].shape == parameter.shape, name
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(False)


def served_weights(source: Llama, far: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by our names: those of ``source``, and the far parts by the names of `Student`."""
    weights: dict[str, Tensor] = {"embedding.weight": source.embedding, "norm.weight": source.norm}
    if source.own_head is not None:
        weights["head.weight"] = source.own_head
    for index in range(source.shape.num_layers):
        for name, parameter in source.layer(index).named_parameters():
            parts = [f"blocks.{index}.{part}" for part in _PARTS[name]]
            weights |= zip(parts, parameter.split(_rows(name, source.shape)), strict=True)
    weights |= {
        name.replace("layers.", "blocks.").replace(".far.", ".mixer.far."): tensor
        for name, tensor in far.items()
        if ".far." in name
    }
    return {name: tensor.detach().contiguous() for name, tensor in weights.items()}


def _rows(part: str, shape: LlamaShape) -> list[int]:
    """Rows of each weight of a part of a layer."""
    heads, kv_heads = (n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads))
    if part in ("qkv", "qkv_bias"):
        return [heads, kv_heads, kv_heads]
    if part == "up":
        return [shape.intermediate_size] * 2
    width = {"q_norm": shape.head_dim, "k_norm": shape.head_dim}.get(part, shape.hidden_size)
    return [width]
