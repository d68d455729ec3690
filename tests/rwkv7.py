"""RWKV-7 weights by their published names, drawn at random, and the files that hold them."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from model.families.rwkv7.config import Rwkv7Config
from model.families.rwkv7.read import NATIVE, parts_of
from model.foreign.weights import Renamed

Published = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; ``ranks`` are those of w, a, v and g."""

    vocab_size: int
    width: int
    layers: int
    head_dim: int
    inner: int
    ranks: tuple[int, int, int, int]

    @property
    def config(self) -> Rwkv7Config:
        decay, rate, value, gate = self.ranks
        return Rwkv7Config(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            head_dim=self.head_dim,
            intermediate_size=self.inner,
            decay_rank=decay,
            rate_rank=rate,
            value_rank=value,
            gate_rank=gate,
        )


#: The last two have the head size of every published model.
SHAPES = {
    "odd": Shape(97, 24, 3, 8, 40, (5, 3, 2, 7)),
    "square": Shape(301, 128, 2, 64, 512, (16, 16, 8, 32)),
    "deep": Shape(330, 192, 6, 64, 768, (32, 24, 16, 48)),
}


def published(shape: Shape, seed: int = 0) -> Published:
    """Every tensor of a native file, with magnitudes like those of a trained model."""
    generator = torch.Generator().manual_seed(seed)
    width, heads = shape.width, shape.width // shape.head_dim

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, generator=generator) * scale

    def norm(key: str) -> Published:
        return {f"{key}.weight": 1 + normal(width, scale=0.2), f"{key}.bias": normal(width) * 0.1}

    def matrix(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, scale=columns**-0.5)

    weights = {"emb.weight": normal(shape.vocab_size, width), **norm("blocks.0.ln0")}
    for layer in range(shape.layers):
        block: Published = {**norm("ln1"), **norm("ln2"), **norm("att.ln_x")}
        for letter in "rwkvag":
            block[f"att.x_{letter}"] = torch.rand(1, 1, width, generator=generator)
        for letter, rank in zip("wavg", shape.ranks, strict=True):
            if letter == "v" and layer == 0:
                continue
            block[f"att.{letter}1"] = matrix(rank, width).T.contiguous()
            block[f"att.{letter}2"] = matrix(width, rank).T.contiguous() * 2
            if letter != "g":
                block[f"att.{letter}0"] = normal(1, 1, width)
        block["att.k_k"] = 0.85 + normal(1, 1, width, scale=0.1)
        block["att.k_a"] = 1 + normal(1, 1, width, scale=0.1)
        block["att.r_k"] = normal(heads, shape.head_dim, scale=0.3)
        for name in ("receptance", "key", "value", "output"):
            block[f"att.{name}.weight"] = matrix(width, width)
        block["ffn.x_k"] = torch.rand(1, 1, width, generator=generator)
        block["ffn.key.weight"] = matrix(shape.inner, width)
        block["ffn.value.weight"] = matrix(width, shape.inner)
        weights |= {f"blocks.{layer}.{key}": tensor for key, tensor in block.items()}
    return {**weights, **norm("ln_out"), "head.weight": matrix(shape.vocab_size, width) * 2}


def filled(shape: Shape, **values: float) -> Published:
    """`published`, with one value in all tensors of these names: ``w0=30.0``, ``k_k=0.0``."""
    return {
        key: torch.full_like(tensor, values[key.rpartition(".")[2]])
        if key.rpartition(".")[2] in values
        else tensor
        for key, tensor in published(shape).items()
    }


def our_weights(shape: Shape, weights: Published) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors of a native file by our names."""
    arrays = {key: tensor.numpy() for key, tensor in weights.items()}
    renamed = Renamed(arrays, parts_of(shape.config, NATIVE))
    return {name: np.ascontiguousarray(renamed[name]) for name in renamed}


def write_pth(path: Path, weights: Any, zipped: bool = True) -> Path:
    """The file that torch writes; not ``zipped``: as it did before version 1.6."""
    torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    return path


def unsaved_member(path: Path, name: str) -> Path:
    """The archive at ``path`` again, in place, without the member ``name``."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            if not member.endswith(name):
                archive.writestr(member, data)
    return path


def fla_names(weights: Published, fused: bool = False) -> Published:
    """The tensors as a folder of fla-hub has them; ``fused`` as older ones have them."""
    parts = {
        "receptance": "r_proj",
        "key": "k_proj",
        "value": "v_proj",
        "output": "o_proj",
        "ln_x": "g_norm",
    }
    norms = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm"}
    model = {"emb": "model.embeddings", "ln_out": "model.norm", "head": "lm_head"}
    renamed: Published = {}
    for key, tensor in weights.items():
        if not key.startswith("blocks."):
            first, _, rest = key.partition(".")
            renamed[f"{model[first]}.{rest}"] = tensor
            continue
        _, layer, part, *rest_of = key.split(".")
        theirs, name = f"model.layers.{layer}", rest_of[0]
        if part != "att":
            renamed[".".join([theirs, norms.get(part, part), *rest_of])] = (
                tensor.flatten() if name == "x_k" else tensor
            )
        elif name in parts:
            renamed[f"{theirs}.attn.{parts[name]}.{rest_of[1]}"] = tensor
        elif name[1:] in ("0", "1", "2"):
            end = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[name[1:]]
            tensor = tensor.flatten() if name[1:] == "0" else tensor.T
            renamed[f"{theirs}.attn.{name[0]}_lora.lora.{end}"] = tensor
        elif name in ("k_k", "k_a"):
            renamed[f"{theirs}.attn.{name}"] = tensor.flatten()
        elif name.startswith("x_") and fused:
            if name == "x_r":
                rows = [weights[f"blocks.{layer}.att.x_{letter}"] for letter in "rwkvag"]
                renamed[f"{theirs}.attn.x_x"] = torch.cat([row[0] for row in rows])
        else:
            renamed[f"{theirs}.attn.{name}"] = tensor
    return {key: tensor.contiguous() for key, tensor in renamed.items()}


def fla_config(shape: Shape) -> dict[str, Any]:
    """The ``config.json`` that flash-linear-attention writes for the sizes."""
    decay, rate, value, gate = shape.ranks
    return {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "attn": None,
        "attn_mode": "chunk",
        "a_low_rank_dim": rate,
        "bos_token_id": 1,
        "decay_low_rank_dim": decay,
        "eos_token_id": 2,
        "fuse_cross_entropy": True,
        "fuse_norm": False,
        "gate_low_rank_dim": gate,
        "head_dim": shape.head_dim,
        "hidden_act": "sqrelu",
        "hidden_ratio": 4.0,
        "hidden_size": shape.width,
        "initializer_range": 0.006,
        "intermediate_size": shape.inner,
        "max_position_embeddings": 2048,
        "norm_bias": True,
        "norm_eps": 1e-5,
        "norm_first": True,
        "num_heads": None,
        "num_hidden_layers": shape.layers,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "v_low_rank_dim": value,
        "value_dim": [shape.width] * shape.layers,
        "vocab_size": shape.vocab_size,
    }


def write_fla(
    folder: Path,
    weights: Published,
    config: dict[str, Any],
    shards: int = 1,
    form: str = "model.safetensors",
) -> Path:
    """A folder of fla-hub, without a tokenizer; ``weights`` by its names.

    ``form`` may be "pytorch_model.bin".
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write = torch.save if form.endswith(".bin") else save_file
    if shards == 1:
        write(weights, folder / form)
        return folder
    stem, suffix = form.split(".")
    names = {}
    for shard in range(shards):
        file = f"{stem}-{shard + 1:05}-of-{shards:05}.{suffix}"
        part = {key: weights[key] for key in sorted(weights)[shard::shards]}
        write(part, folder / file)
        names |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": names}
    (folder / f"{form}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
