"""The source of a conversion: a Llama in any form that loads, in torch, and its tokenizer.

Its attention is softmax, and its weights do not change.
Touvron et al. 2023, "LLaMA", section 2.2: RMSNorm before each part, SwiGLU, rotary positions;
keys and values are shared by groups of heads (Ainslie et al. 2023, "GQA").

Symbols: B texts, T tokens, D width, H heads of queries, H_kv of keys and values, K width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.hybrid import SINKS
from model.checkpoint import Checkpoint, load_checkpoint, locate
from model.convert.linearize.chats import ChatFormat, chat_format
from model.convert.linearize.plan import LlamaShape
from model.families.llama.config import LlamaConfig
from model.files import ConfigError
from model.hub.base import file_digest
from model.ops.fused import rms_norm, swiglu
from model.tokenizer import Tokenizer


class LlamaLayer(nn.Module):
    """The weights of one layer; q, k and v are rows of one matrix, and so are gate and value."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        sizes = matrix_sizes(shape)
        self.attention_norm = _frozen(shape.hidden_size)
        self.qkv = _frozen(*sizes["qkv"])
        self.out = _frozen(*sizes["out"])
        self.mlp_norm = _frozen(shape.hidden_size)
        self.up = _frozen(*sizes["up"])
        self.down = _frozen(*sizes["down"])
        self.qkv_bias = _frozen(sizes["qkv"][0]) if shape.qkv_bias else None
        self.q_norm = _frozen(shape.head_dim) if shape.qk_norm else None
        self.k_norm = _frozen(shape.head_dim) if shape.qk_norm else None


def matrix_sizes(shape: LlamaShape) -> dict[str, tuple[int, int]]:
    """Rows and columns of the matrices of a layer, by name."""
    width, inner, queries = shape.hidden_size, shape.intermediate_size, shape.num_heads
    return {
        "qkv": ((queries + 2 * shape.num_kv_heads) * shape.head_dim, width),
        "out": (width, queries * shape.head_dim),
        "up": (2 * inner, width),
        "down": (width, inner),
    }


class Llama(nn.Module):
    """The source model. Matrices may be in bfloat16; the residual stream is in float32."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = _frozen(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.num_layers))
        self.norm = _frozen(shape.hidden_size)
        self.own_head = None if shape.tied else _frozen(shape.vocab_size, shape.hidden_size)

    @property
    def head(self) -> Tensor:
        """What gives the logits [vocabulary, D]."""
        return self.embedding if self.own_head is None else self.own_head

    def embedded(self, ids: Tensor) -> Tensor:
        """``ids`` [...] to the input of the first layer [..., D]."""
        return F.embedding(ids, self.embedding).float()

    def layer(self, index: int) -> LlamaLayer:
        """The weights of layer ``index``."""
        layer = self.layers[index]
        assert isinstance(layer, LlamaLayer)
        return layer

    @torch.no_grad()
    def hidden(self, ids: Tensor, past: int = 0) -> Tensor:
        """``ids`` [B, T] to the normed output of the last layer [B, T, D].

        With ``past`` a token sees the first tokens and the last others, so many in all.
        """
        x = self.embedded(ids)
        for index in range(self.shape.num_layers):
            x = self.after_layer(index, x, past)
        return self.final_norm(x)

    def after_layer(self, index: int, x: Tensor, past: int = 0) -> Tensor:
        """The residual stream [B, T, D] after layer ``index``."""
        layer = self.layer(index)
        q, k, v = self.heads(index, F.linear(self.attention_input(index, x), layer.qkv))
        turned, keys = rotated(q, k, self.shape)
        if past and x.shape[1] > past:
            to_sinks = rotated_at_most(q, past, self.shape)
            o = sliding_attention(turned, to_sinks, keys, v, past - SINKS, SINKS)
        else:
            o = full_attention(turned, keys, v)
        x = x + F.linear(merged(o), layer.out)
        return self.after_mlp(index, x)

    def attention_input(self, index: int, x: Tensor) -> Tensor:
        """What layer ``index`` makes q, k and v of."""
        return rms_norm(x, self.layer(index).attention_norm, self.shape.rms_norm_eps)

    def heads(self, index: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The product [B, T, (H + 2 H_kv) K] to q [B, H, T, K] and k, v [B, H_kv, T, K].

        With biases and norms, not rotated.
        """
        layer, shape = self.layer(index), self.shape
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        q, k, v = heads_of(qkv, shape)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q.float(), layer.q_norm, shape.rms_norm_eps)
            k = rms_norm(k.float(), layer.k_norm, shape.rms_norm_eps)
        return q, k, v

    def after_mlp(self, index: int, x: Tensor, linear: Linear | None = None) -> Tensor:
        """``x`` with the second half of layer ``index``. ``linear`` may add to its products."""
        layer, product = self.layer(index), linear or _plain
        normed = rms_norm(x, layer.mlp_norm, self.shape.rms_norm_eps)
        return x + product("down", swiglu(product("up", normed, layer.up)), layer.down)

    def final_norm(self, x: Tensor) -> Tensor:
        """The input of the head."""
        return rms_norm(x, self.norm, self.shape.rms_norm_eps)


#: A product by name: input [..., columns], weight [rows, columns] to [..., rows].
Linear = Callable[[str, Tensor, Tensor], Tensor]


def _plain(name: str, x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def _frozen(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


def heads_of(qkv: Tensor, shape: LlamaShape) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, (H + 2 H_kv) K] to q [B, H, T, K] and k, v [B, H_kv, T, K], not rotated."""
    heads = qkv.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    return q, k, v


def merged(o: Tensor) -> Tensor:
    """[B, H, T, K] to [B, T, H K]."""
    return o.transpose(1, 2).flatten(2)


def rotated(q: Tensor, k: Tensor, shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """Rotates q and k [B, heads, T, K] of whole texts by their positions."""
    cos, sin = angles(torch.arange(q.shape[2], device=q.device), shape)
    cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotated_at_most(q: Tensor, farthest: int, shape: LlamaShape) -> Tensor:
    """Queries [B, H, T, K] of whole texts for the first tokens, seen no farther than that away."""
    positions = torch.arange(q.shape[2], device=q.device).clamp_max(farthest - 1)
    cos, sin = angles(positions, shape)
    return rotate(q, cos.to(q.dtype), sin.to(q.dtype))


def angles(positions: Tensor, shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., K/2] of ``positions`` [...], as float32 from float64."""
    half = shape.head_dim // 2
    exponent = torch.arange(half, dtype=torch.float64, device=positions.device) / half
    frequencies = shape.rope_theta**-exponent
    if shape.rope_factors:
        frequencies = frequencies / frequencies.new_tensor(shape.rope_factors)
    angle = positions.double().unsqueeze(-1) * frequencies
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x_i, x_{i + K/2}); with -sin it is the reverse."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def full_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention: rotated q [B, H, T, K], k, v [B, H_kv, T, K] to [B, H, T, K]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


#: Queries that `sliding_attention` computes at a time: their scores stay in the cache.
SLIDING_BLOCK = 128


@torch.no_grad()
def sliding_attention(
    q: Tensor, to_sinks: Tensor, k: Tensor, v: Tensor, window: int, sinks: int
) -> Tensor:
    """Softmax attention to the last ``window`` tokens and the first ones, without gradients.

    Rotated ``q`` [B, H, T, K] and ``k``, ``v`` [B, H_kv, T, K] to [B, H, T, K]. The first tokens
    are seen by ``to_sinks`` once they have left the window. `student.near_attention` is faster
    where windows are short.
    """
    num_tokens, group, outputs = q.shape[2], q.shape[1] // k.shape[1], []
    rows, first_rows = (x.unflatten(1, (-1, group)) * q.shape[-1] ** -0.5 for x in (q, to_sinks))
    for start in range(0, num_tokens, SLIDING_BLOCK):
        end = min(start + SLIDING_BLOCK, num_tokens)
        size, oldest = end - start, start - window + 1
        num_first, near = (sinks, max(sinks, oldest)) if oldest + size > 1 else (0, 0)
        parts = (first_rows, (0, num_first)), (rows, (near, end))
        scores = torch.cat(
            [
                queries[:, :, :, start:end].flatten(2, 3) @ k[:, :, slice(*seen)].transpose(-1, -2)
                for queries, seen in parts
            ],
            dim=-1,
        ).unflatten(2, (group, size))
        at = torch.arange(start, end, device=q.device).unsqueeze(1)
        keys = torch.cat([torch.arange(*seen, device=q.device) for _, seen in parts])
        hidden = (keys > at) | ((keys <= at - window) & (keys >= sinks))
        for edge in (slice(num_first + size), slice(-size, None)):  # all between them is seen
            scores[..., edge].masked_fill_(hidden[:, edge], -torch.inf)
        values = torch.cat([v[:, :, slice(*seen)] for _, seen in parts], dim=2)
        o = scores.softmax(dim=-1).flatten(2, 3) @ values
        outputs.append(o.unflatten(2, (group, size)))
    return torch.cat(outputs, dim=3).flatten(1, 2)


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
