"""Oracles of the mechanisms with a decay, an output norm and a gate; see `oracles`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention.base import Attention, State
from tests.model.attention.projections import (
    Weights,
    distance,
    heads,
    linear,
    option,
    qkv,
    rotary,
)


def retnet(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    positions = option(layer, "positions", "xpos")
    q, k, v = heads(qkv(weights, x), layer, option(layer, "key_dim", 0))
    width = q.shape[-1]
    if positions != "none":
        q, k = rotary(q), rotary(k)
    a = retention_decay(layer).unsqueeze(1).expand(-1, width)  # [H, K]
    if positions == "xpos":
        pair = torch.arange(width // 2, dtype=torch.float64)
        zeta = (2 * pair / width + 0.4) / 1.4
        a = a * torch.cat([zeta, zeta]) ** (1 / 512)
    return decayed(q / math.sqrt(width), k, v, a)


def dijiang(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = heads(qkv(weights, x), layer)
    width, heads_num = q.shape[-1], layer.config.num_attention_heads
    n = torch.arange(width, dtype=torch.float64)
    basis = torch.cos(math.pi / width * n.unsqueeze(1) * (n + 0.5)) * math.sqrt(2 / width)
    basis[0] = math.sqrt(1 / width)
    decay = retention_decay(layer)
    if option(layer, "published", default=False):
        q, k, basis = rotary(q), rotary(k), basis.T
        share = torch.arange(heads_num, dtype=torch.float64) / max(1, heads_num - 1)
        decay = 1 - 32.0 ** -(1 - share) * 512.0**-share
    weight = weights.get("frequency_draw", weights.get("frequency_weight"))
    phi_q, phi_k = (torch.softmax(weight * (t @ basis.T), dim=-1) for t in (q, k))
    num, state = decayed(phi_q, phi_k, v, decay.unsqueeze(1).expand(-1, width))
    return num - num.mean(-1, keepdim=True), state


def retention_decay(layer: Attention) -> Tensor:
    return 1 - 2.0 ** (-5 - torch.arange(layer.config.num_attention_heads, dtype=torch.float64))


def decayed(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, State]:
    """The sum with weights a^(i - j) for each head and channel, ``a`` [H, K]."""
    lag = distance(q.shape[1]).clamp_min(0).double()
    weight = a[:, None, None] ** lag[None, :, :, None]  # [H, i, j, K]
    scores = torch.einsum("bihk,bjhk,hijk->bhij", q, k, weight).tril()
    num = torch.einsum("bhij,bjhv->bihv", scores, v)
    return num, {"S": torch.einsum("bjhk,hjk,bjhv->bhkv", k, weight[:, -1], v)}


def normed(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    kind, width = option(layer, "map", "product"), option(layer, "key_dim", 0)
    q, k, v = heads(qkv(weights, x), layer, width)
    if kind == "product":
        (q, other_q), (k, other_k) = (
            linear(weights, f"{name}_map.both", t).chunk(2, -1) for name, t in (("q", q), ("k", k))
        )
        q, k = q * other_q, k * other_k
    elif kind != "identity":
        q, k = (F.elu(t) + 1 if kind == "elu" else t.relu() for t in (q, k))
    scores = torch.einsum("bihk,bjhk->bhij", q, k).tril() / math.sqrt(q.shape[-1])
    o = torch.einsum("bhij,bjhv->bihv", scores, v)
    return o, {"S": torch.einsum("bjhk,bjhv->bhkv", k, v)}


def gated(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = heads(qkv(weights, x), layer, option(layer, "key_dim", 0))
    logit = linear(weights, "decay_up", linear(weights, "decay_down", x))
    b = (F.logsigmoid(logit) / 16).clamp_min(-5.0).unflatten(-1, k.shape[2:]).cumsum(1)
    decay = torch.exp((b.unsqueeze(2) - b.unsqueeze(1)).clamp_max(0.0))  # [B, i, j, H, K]
    scores = torch.einsum("bihk,bjhk,bijhk->bhij", q, k, decay).tril() / math.sqrt(q.shape[-1])
    num = torch.einsum("bhij,bjhv->bihv", scores, v)
    return num, {"S": torch.einsum("bjhk,bjhk,bjhv->bhkv", k, decay[:, -1], v)}


def delta(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    """Solved for all tokens at once.

    What token i writes along with its key, u_i = beta_i (v_i - a_i S_{i-1}^T k_i), depends on
    the u_j before it: a triangular system. S_i is the decayed sum of k_j u_j^T.
    """
    q, k, v = heads(qkv(weights, x), layer, option(layer, "key_dim", 0))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    beta = torch.sigmoid(linear(weights, "beta", x)).transpose(1, 2).unsqueeze(-1)  # [B, H, T, 1]
    beta = beta * (2 if option(layer, "negative_eigenvalues", False) else 1)
    log_a = torch.zeros_like(beta)  # [B, H, T, 1], or K numbers in the place of one
    if option(layer, "channel_decay", default=False):
        logit = linear(weights, "decay_up", linear(weights, "decay_down", x))
        logit = logit.unflatten(-1, k.shape[2:]).transpose(1, 2)
        rate = torch.exp(weights["decay_log"])[:, None, None] * F.softplus(logit)
        log_a = (-rate).clamp_min(-5.0)
    elif option(layer, "decay", default=True):
        rate = torch.exp(weights["decay_log"]) * F.softplus(linear(weights, "decay", x))
        log_a = -rate.transpose(1, 2).unsqueeze(-1)
    b = log_a.cumsum(2)
    decay = torch.exp((b.unsqueeze(3) - b.unsqueeze(2)).clamp_max(0.0))  # [B, H, i, j, 1 or K]
    decay = decay.expand(*decay.shape[:-1], k.shape[-1])
    read = torch.einsum("bihk,bjhk,bhijk->bhij", k, k, decay)
    identity = torch.eye(x.shape[1], dtype=x.dtype)
    u = torch.linalg.solve(identity + beta * read.tril(-1), beta * v.transpose(1, 2))
    scores = torch.einsum("bihk,bjhk,bhijk->bhij", q, k, decay).tril() / math.sqrt(q.shape[-1])
    num = (scores @ u).transpose(1, 2)
    return num, {"S": torch.einsum("bjhk,bhjk,bhjv->bhkv", k, decay[:, :, -1], u)}
