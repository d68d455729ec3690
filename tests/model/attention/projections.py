"""What the oracles share: options, projections into heads and back, rotation, the causal mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention.base import Attention, State

T = TypeVar("T")
Weights = dict[str, Tensor]
Oracle = Callable[[Attention, Weights, Tensor], tuple[Tensor, State]]


def option(layer: Attention, name: str, default: T) -> T:
    """The option's value, or the default that the mechanism's definition gives."""
    value = layer.config.attention_options.get(name, default)
    assert isinstance(value, type(default)), (name, value)
    return value


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def heads(qkv: Tensor, layer: Attention, key_dim: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, key_dim] and v [B, T, H, V]; ``key_dim`` 0 is V."""
    num, dim = layer.config.num_attention_heads, layer.config.head_dim
    width = num * (key_dim or dim)
    q, k, v = qkv.split([width, width, num * dim], dim=-1)
    return q.unflatten(-1, (num, -1)), k.unflatten(-1, (num, -1)), v.unflatten(-1, (num, -1))


def projected(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, of which q and k are rotated where the option ``rotary`` is "before"."""
    q, k, v = heads(linear(weights, "qkv", x), layer)
    default = "before" if layer.config.attention in ("window_linear", "softmax") else "none"
    if option(layer, "rotary", default) == "before":
        q, k = rotated(layer, q, k)
    return q, k, v


def rotated(layer: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    base = option(layer, "rope_theta", 10_000.0)
    return rotary(q, base), rotary(k, base)


def scaled(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`projected` with q and k times K^(-1/4), so that q . k is the softmax's exponent."""
    q, k, v = projected(layer, weights, x)
    return q * q.shape[-1] ** -0.25, k * k.shape[-1] ** -0.25, v


def gated_output(layer: Attention, weights: Weights, o: Tensor, x: Tensor) -> Tensor:
    """The output of the mechanisms with a norm and a gate; ``o`` [B, T, H, V] is normed."""
    o = (o * weights["norm_weight"]).flatten(2)
    if "gate.weight" not in weights:
        return linear(weights, "out", o)
    gate = linear(weights, "gate", x)
    return linear(weights, "out", o * gate * torch.sigmoid(gate))


def rms_normed(layer: Attention, o: Tensor) -> Tensor:
    return o / (o.square().mean(-1, keepdim=True) + layer.config.rms_norm_eps).sqrt()


def convolved(weights: Weights, x: Tensor, size: int) -> tuple[Tensor, State]:
    """The causal depthwise convolution and a silu over [B, T, C]; none where ``size`` is 0."""
    if not size:
        return x, {}
    length = x.shape[1]
    padded = F.pad(x, (0, 0, size - 1, 0))
    y = torch.zeros_like(x)
    for i in range(size):
        y = y + padded[:, i : i + length] * weights["conv_weight"][:, i]
    return y * torch.sigmoid(y), {"conv": padded[:, length:]}


def rotary(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Each pair (x_i, x_{i + K/2}) as a complex number times exp(i t theta)."""
    half = x.shape[-1] // 2
    theta = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64).unsqueeze(1) * theta
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


def distance(length: int) -> Tensor:
    """The lag i - j as [T, T]; negative where key j is in the future of query i."""
    where = torch.arange(length)
    return where.unsqueeze(1) - where


def future(length: int) -> Tensor:
    return distance(length) < 0
