"""The definition of each mechanism as a plain quadratic sum in float64.

Written from the formulas in the mechanisms' docstrings, with no code shared
with `model`, and on purpose without any chunk, scan or cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention.base import Attention, State

Oracle = Callable[[Attention, dict[str, Tensor], Tensor], tuple[Tensor, State]]


def elu(layer: Attention, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, State]:
    q, k, v = heads(x @ weights["qkv.weight"].T, layer)
    phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
    scores = torch.einsum("bihk,bjhk->bhij", phi_q, phi_k).tril()
    num = torch.einsum("bhij,bjhv->bihv", scores, v)
    den = scores.sum(-1).transpose(1, 2).unsqueeze(-1)
    y = (num / (den + 1e-6)).flatten(2) @ weights["out.weight"].T
    return y, {"S": torch.einsum("bjhk,bjhv->bhkv", phi_k, v), "z": phi_k.sum(1)}


def gated(layer: Attention, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, State]:
    config, state = layer.config, {}
    qkv = x @ weights["qkv.weight"].T
    conv_size = int(str(config.attention_options.get("conv_size", 4)))
    if conv_size:
        before = torch.zeros(x.shape[0], conv_size - 1, qkv.shape[2], dtype=x.dtype)
        padded = torch.cat([before, qkv], dim=1)
        state["conv"] = padded[:, padded.shape[1] - conv_size + 1 :]
        qkv = sum(
            padded[:, i : i + x.shape[1]] * weights["conv_weight"][:, i] for i in range(conv_size)
        )
        qkv = qkv * torch.sigmoid(qkv)
    q, k, v = heads(qkv, layer)
    logit = x @ weights["decay_down.weight"].T @ weights["decay_up.weight"].T
    logit = logit + weights["decay_up.bias"]
    log_a = (-torch.log1p(torch.exp(-logit)) / 16).clamp_min(-2.5)
    b = log_a.unflatten(-1, q.shape[2:]).cumsum(1)
    decay = torch.exp(b.unsqueeze(2) - b.unsqueeze(1)).clamp_max(1.0)  # [B, i, j, H, K]
    scores = torch.einsum("bihk,bjhk,bijhk->bhij", q, k, decay).tril() / math.sqrt(config.head_dim)
    o = torch.einsum("bhij,bjhv->bihv", scores, v)
    o = o / (o.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    o = (o * weights["norm_weight"]).flatten(2)
    gate = x @ weights["gate.weight"].T
    state["S"] = torch.einsum("bjhk,bjhv->bhkv", k * torch.exp(b[:, -1:] - b), v)
    return (o * gate * torch.sigmoid(gate)) @ weights["out.weight"].T, state


def softmax(layer: Attention, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, State]:
    q, k, v = heads(x @ weights["qkv.weight"].T, layer)
    q, k = rotary(q), rotary(k)
    scores = torch.einsum("bihk,bjhk->bhij", q, k) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    p = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
    y = torch.einsum("bhij,bjhv->bihv", p, v).flatten(2) @ weights["out.weight"].T
    return y, {"k": k.transpose(1, 2), "v": v.transpose(1, 2)}


def heads(qkv: Tensor, layer: Attention) -> tuple[Tensor, Tensor, Tensor]:
    config = layer.config
    parts = qkv.unflatten(-1, (3, config.num_attention_heads, config.head_dim))
    return parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]


def rotary(x: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + K/2}) as a complex number times exp(i t theta)."""
    half = x.shape[-1] // 2
    theta = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64).unsqueeze(1) * theta
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


ORACLES: dict[str, Oracle] = {"elu": elu, "gated": gated, "softmax": softmax}
