"""Oracles of the mechanisms whose weights are sums of exponentials; see `oracles`.

A weight is kept as its logarithm until the softmax over the keys, so nothing
here overflows and no maximum is carried along.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.attention.base import Attention, State
from tests.model.attention.projections import (
    Weights,
    distance,
    future,
    option,
    projected,
    scaled,
)


def performer(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = scaled(layer, weights, x)
    w = weights["projection"]
    log_q, name = project(q, w), option(layer, "map", "favor")
    if name == "favor":
        log_k = project(k, w) - half_square(k)
    elif name == "hyperbolic":
        log_q = torch.cat([log_q, -log_q], dim=-1)
        log_k = torch.cat([project(k, w), project(k, -w)], dim=-1) - half_square(k)
    elif name == "relu":
        log_q = torch.log(log_q.relu() + 1e-3)
        log_k = torch.log(project(k, w).relu() + 1e-3)
    else:
        log_k = torch.log_softmax(-half_distances(k, w), dim=-1)
    return from_features(log_q, log_k, v)


def rbf(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = scaled(layer, weights, x)
    w = weights["projection"]
    return from_features(project(q, w), project(k, w) - 2 * half_square(k), v)


def soft_vq(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = scaled(layer, weights, x)
    codebook, beta = weights["codebook"], option(layer, "beta", 1.0)
    log_prior = torch.log_softmax(weights["log_prior"], dim=-1)
    log_k = torch.log_softmax(log_prior - beta * half_distances(k, codebook), dim=-1)
    return from_features(project(q, codebook), log_k, v)


def efficient(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    """A softmax over the positions for each feature, mixed by the query's softmax over features."""
    q, k, v = projected(layer, weights, x)
    if option(layer, "denominator", "feature") == "weights":
        return from_features(q, k, v)
    log_p = k.permute(0, 2, 3, 1).unsqueeze(3).expand(-1, -1, -1, x.shape[1], -1)  # b h f i j
    p = torch.softmax(log_p.masked_fill(future(x.shape[1]), -math.inf), dim=-1)
    o = torch.einsum("bihf,bhfij,bjhv->bihv", q.softmax(-1), p, v)
    return o, feature_sums(k, v)


def window_linear(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = scaled(layer, weights, x)
    window, length = option(layer, "window", 64), x.shape[1]
    near = torch.einsum("bihk,bjhk->bhij", q, k)
    if option(layer, "older", "linear") == "forgotten":
        o = attend(near.masked_fill(distance(length) >= window, -math.inf), v)
        return o, {"k": last(k, window), "v": last(v, window)}
    w = weights["projection"]
    half_log_m = math.log(w.shape[1]) / 2
    log_k = project(k, w) - half_square(k) - half_log_m
    far = mixed(project(q, w) - half_square(q) - half_log_m, log_k)
    o = attend(torch.where(distance(length) < window, near, far), v)
    left = max(length - window, 0)
    state = {"k": last(k, window), "v": last(v, window)}
    return o, state | feature_sums(log_k[:, :left], v[:, :left])


def vq(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = scaled(layer, weights, x)
    codebook, window, length = weights["codebook"], option(layer, "window", 64), x.shape[1]
    code = half_distances(k, codebook).argmin(-1)  # [B, T, H]
    nearest = codebook[torch.arange(codebook.shape[0]), code].detach()
    straight_through = nearest + (k - k.detach())
    lag = distance(length)
    bias = weights["bias"][:, lag.clamp(0, window - 1)]  # [H, i, j]
    near = torch.einsum("bihk,bjhk->bhij", q, straight_through) + bias
    far = torch.einsum("bihk,bjhk->bhij", q, nearest)
    o = attend(torch.where(lag < window, near, far), v)
    left = max(length - window, 0)
    chosen = code.unsqueeze(-1) == torch.arange(codebook.shape[1])  # [B, T, H, C]
    state = {
        "code": last(code, window),
        "v": last(v, window),
        "count": chosen[:, :left].sum(1),
        "sum": torch.einsum("bjhc,bjhv->bhcv", chosen[:, :left].to(v.dtype), v[:, :left]),
    }
    return o, state


def from_features(log_q: Tensor, log_k: Tensor, v: Tensor) -> tuple[Tensor, State]:
    o = attend(mixed(log_q, log_k), v)
    return o, feature_sums(log_k, v)


def mixed(log_q: Tensor, log_k: Tensor) -> Tensor:
    """The logarithm of sum_f exp(log_q_if + log_k_jf) as [B, H, i, j]."""
    log_q, log_k = log_q.transpose(1, 2).unsqueeze(3), log_k.transpose(1, 2).unsqueeze(2)
    return torch.logsumexp(log_q + log_k, dim=-1)


def attend(log_weight: Tensor, v: Tensor) -> Tensor:
    """The causal softmax of [B, H, i, j] over the keys, times the values."""
    p = torch.softmax(log_weight.masked_fill(future(v.shape[1]), -math.inf), dim=-1)
    return torch.einsum("bhij,bjhv->bihv", p, v)


def feature_sums(log_k: Tensor, v: Tensor) -> State:
    """Each feature's sums over the tokens, relative to its maximum; zeros without a token."""
    batch, length, num, features = log_k.shape
    if not length:
        empty = v.new_zeros(batch, num, features)
        return {"max": empty, "S": v.new_zeros(*empty.shape, v.shape[-1]), "z": empty}
    top = log_k.amax(1)
    phi = torch.exp(log_k - top.unsqueeze(1))
    return {"max": top, "S": torch.einsum("bjhf,bjhv->bhfv", phi, v), "z": phi.sum(1)}


def project(x: Tensor, w: Tensor) -> Tensor:
    """[B, T, H, K] on each head's rows [H, F, K], as [B, T, H, F]."""
    return torch.einsum("bthk,hfk->bthf", x, w)


def half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


def half_distances(x: Tensor, w: Tensor) -> Tensor:
    """|x - w_f|^2 / 2 as [B, T, H, F]."""
    return (x.unsqueeze(-2) - w).square().sum(-1) / 2


def last(x: Tensor, window: int) -> Tensor:
    """The last ``window`` tokens, oldest first, behind zeros where there are fewer."""
    missing = x.new_zeros(x.shape[0], max(window - x.shape[1], 0), *x.shape[2:])
    return torch.cat([missing, x[:, max(x.shape[1] - window, 0) :]], dim=1)
