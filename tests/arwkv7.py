"""ARWKV weights by their published names, drawn at random, and the files that hold them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file

from model.families.rwkv7.config import Arwkv7Config
from model.families.rwkv7.read_arwkv import FOLDER, renamed
from model.tokenizer import Tokenizer
from tests import rwkv7
from tests.gguf_files import Fill, Tensors, finish
from tests.rwkv7 import Published


@dataclass(frozen=True)
class Shape(rwkv7.Shape):
    """The sizes of a model; without a ``gate`` its rank is not used."""

    gate: bool = False
    group_norm: bool = False
    tied: bool = False

    @property
    def config(self) -> Arwkv7Config:
        decay, rate, value, gate = self.ranks
        return Arwkv7Config(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            head_dim=self.head_dim,
            intermediate_size=self.inner,
            decay_rank=decay,
            rate_rank=rate,
            value_rank=value,
            gate_rank=gate if self.gate else 0,
            group_norm=self.group_norm,
            tied=self.tied,
            eos_token_id=2,
        )


RANKS = (64, 64, 32, 128)
#: All but the first have the head size and the ranks of every published model.
SHAPES = {
    "odd": Shape(97, 24, 3, 8, 40, (5, 3, 2, 7)),
    "odd_gated": Shape(97, 24, 3, 8, 40, (5, 3, 2, 7), gate=True, group_norm=True, tied=True),
    "plain": Shape(320, 128, 3, 64, 256, RANKS),
    "gated": Shape(320, 128, 3, 64, 256, RANKS, gate=True),
    "normed": Shape(320, 128, 2, 64, 256, RANKS, group_norm=True, tied=True),
    "both": Shape(320, 192, 4, 64, 448, RANKS, gate=True, group_norm=True),
}


def published(shape: Shape, seed: int = 0) -> Published:
    """Every tensor of a folder; the embedding again as the head where the two are tied."""
    generator = torch.Generator().manual_seed(seed)
    weights: Published = {}
    for key, tensor in rwkv7.published(shape, seed).items():
        if ".att." in key:
            layer, name = key.removeprefix("blocks.").split(".att.")
            if (shape.gate or name not in ("g1", "g2", "x_g")) and (
                shape.group_norm or not name.startswith("ln_x")
            ):
                weights[f"model.layers.{layer}.self_attn.time_mixer.{name}"] = tensor
        elif key.endswith((".ln1.weight", ".ln2.weight")):
            layer, name = key.removeprefix("blocks.").split(".", 1)
            norms = {"ln1.weight": "input_layernorm", "ln2.weight": "post_attention_layernorm"}
            weights[f"model.layers.{layer}.{norms[name]}.weight"] = tensor
    for layer in range(shape.layers):
        for name in ("gate", "up", "down"):
            rows, columns = (shape.inner, shape.width)[:: -1 if name == "down" else 1]
            matrix = torch.randn(rows, columns, generator=generator) * columns**-0.5
            weights[f"model.layers.{layer}.mlp.{name}_proj.weight"] = matrix
    size = (shape.vocab_size, shape.width)
    # As the head too it is small: else each token would follow itself.
    scale = 0.1 if shape.tied else 1.0
    weights["model.embed_tokens.weight"] = scale * torch.randn(size, generator=generator)
    weights["model.norm.weight"] = 1 + torch.randn(shape.width, generator=generator) * 0.2
    if not shape.tied:
        head = torch.randn(size, generator=generator) * 2 * shape.width**-0.5
        weights["lm_head.weight"] = head
    return weights


def our_weights(shape: Shape, weights: Published) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors of a folder by our names."""
    arrays = {key: tensor.numpy() for key, tensor in weights.items()}
    found = renamed(arrays, "weights", shape.config, FOLDER, set())
    return {name: np.ascontiguousarray(found[name]) for name in found}


def folder_config(shape: Shape) -> dict[str, Any]:
    """The ``config.json`` of a model with the sizes; heads are those of the donor."""
    return {
        "architectures": ["RwkvHybridForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "head_size": shape.head_dim,
        "head_size_divisor": 8,
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "initializer_range": 0.02,
        "intermediate_size": shape.inner,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "rwkv_hybrid",
        "num_attention_heads": 28,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.48.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
        "wkv_has_gate": shape.gate,
        "wkv_has_group_norm": shape.group_norm,
        "wkv_version": 7,
    }


def write_folder(
    folder: Path, weights: Published, config: dict[str, Any], tokenizer: Tokenizer
) -> Path:
    """A folder as it is published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(
        {key: tensor.contiguous() for key, tensor in weights.items()}, folder / "m.safetensors"
    )
    (folder / "m.safetensors").rename(folder / "model.safetensors")
    tokenizer.save(folder / "tokenizer.json")
    return folder


_MODULES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "ln_x.weight": "time_mix_ln.weight",
    "ln_x.bias": "time_mix_ln.bias",
}


def gguf_tensors(shape: Shape, weights: Published) -> Tensors:
    """The tensors of a folder by their names in GGUF, in its orientation."""
    embedding = weights["model.embed_tokens.weight"].numpy()
    tensors: Tensors = {
        "token_embd.weight": embedding,
        "output.weight": embedding if shape.tied else weights["lm_head.weight"].numpy(),
        "output_norm.weight": weights["model.norm.weight"].numpy(),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        block: Tensors = {}
        for key, tensor in weights.items():
            if not key.startswith(prefix):
                continue
            name = key.removeprefix(prefix).removeprefix("self_attn.time_mixer.")
            data = tensor.numpy()
            if name in _MODULES:
                block[_MODULES[name]] = data
            elif name.startswith("x_"):
                continue
            elif name[1:] in ("1", "2"):
                block[f"time_mix_{name}.weight"] = np.ascontiguousarray(data.T)
            else:
                name = name.removesuffix(".weight")
                flat = data.flatten() if name == "r_k" or name[1:] == "0" else data.squeeze()
                block[f"time_mix_{name}.weight"] = flat
        letters = "rwkvag" if shape.gate else "rwkva"
        mixes = [weights[f"{prefix}self_attn.time_mixer.x_{letter}"] for letter in letters]
        block["time_mix_lerp_fused.weight"] = np.stack([mix.numpy() for mix in mixes])
        if layer == 0:
            for digit in "012":
                block[f"time_mix_v{digit}.weight"] = block[f"time_mix_a{digit}.weight"]
        tensors |= {f"blk.{layer}.{name}": data for name, data in block.items()}
    return tensors


def write_gguf(
    path: Path,
    shape: Shape,
    tensors: Tensors,
    fill: Fill,
    kind: str = "F32",
    change: dict[str, Any] | None = None,
) -> Path:
    """The file; matrices as ``kind``. ``change``: other values for keys; None leaves one out."""
    writer = GGUFWriter(path, "arwkv7")
    decay, rate, value, gate = shape.ranks
    values: dict[str, Any] = {
        "context_length": 1 << 20,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "wkv.head_size": shape.head_dim,
        "attention.decay_lora_rank": decay,
        "attention.iclr_lora_rank": rate,
        "attention.value_residual_mix_lora_rank": value,
        "attention.gate_lora_rank": gate if shape.gate else 0,
        "feed_forward_length": shape.inner,
        "token_shift_count": 1,
        "attention.head_count": 0,
        **(change or {}),
    }
    for key, number in values.items():
        if isinstance(number, int):
            writer.add_uint32(f"arwkv7.{key}", number)
        elif isinstance(number, float):
            writer.add_float32(f"arwkv7.{key}", number)
    fill(writer)
    for name, data in tensors.items():
        stays = (
            data.ndim != 2
            or "_norm" in name
            or name.split(".")[-2][:-1].endswith(("_w", "_a", "_v", "_g"))
        )
        type_ = GGMLQuantizationType["F32" if stays else kind]
        writer.add_tensor(name, quantize(np.ascontiguousarray(data), type_), raw_dtype=type_)
    finish(writer)
    return path
