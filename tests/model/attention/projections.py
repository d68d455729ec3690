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


def heads(projection: Tensor, layer: Attention, key_dim: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, key_dim] and v [B, T, H, V]; ``key_dim`` 0 is V."""
    num, dim = layer.config.num_attention_heads, layer.config.head_dim
    width = num * (key_dim or dim)
    q, k, v = projection.split([width, width, num * dim], dim=-1)
    return q.unflatten(-1, (num, -1)), k.unflatten(-1, (num, -1)), v.unflatten(-1, (num, -1))


def projected(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, of which q and k are rotated where the option ``rotary`` is "before"."""
    q, k, v = heads(qkv(weights, x), layer, option(layer, "key_dim", 0))
    if option(layer, "qk_norm", default=False):
        q, k = rms_normed(layer, q), rms_normed(layer, k)
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


def with_parts(core: Oracle) -> Oracle:
    """A core's oracle with norm, gate, output matrix and the convolution's state."""

    def oracle(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
        o, state = core(layer, weights, x)
        if "norm_weight" in weights:
            o = rms_normed(layer, o) * weights["norm_weight"]
        o = o.flatten(2)
        if "gate.weight" in weights:
            gate = linear(weights, "gate", x)
            o = o * gate * torch.sigmoid(gate)
        return linear(weights, "out", o), state | convolution_state(weights, x)

    return oracle


def rms_normed(layer: Attention, o: Tensor) -> Tensor:
    return o / (o.square().mean(-1, keepdim=True) + layer.config.rms_norm_eps).sqrt()


def qkv(weights: Weights, x: Tensor) -> Tensor:
    """q, k and v in one, after the causal depthwise convolution and a silu, if there is one."""
    x = linear(weights, "qkv", x)
    if "conv_weight" not in weights:
        return x
    size, length = weights["conv_weight"].shape[1], x.shape[1]
    padded = F.pad(x, (0, 0, size - 1, 0))
    y = torch.zeros_like(x)
    for i in range(size):
        y = y + padded[:, i : i + length] * weights["conv_weight"][:, i]
    return y * torch.sigmoid(y)


def convolution_state(weights: Weights, x: Tensor) -> State:
    """The last inputs of the convolution, zeros before the first token."""
    if "conv_weight" not in weights:
        return {}
    kept = weights["conv_weight"].shape[1] - 1
    padded = F.pad(linear(weights, "qkv", x), (0, 0, kept, 0))
    return {"conv": padded[:, padded.shape[1] - kept :]}


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
