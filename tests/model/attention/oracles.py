"""The definition of each mechanism as a plain quadratic sum in float64.

An oracle here gives the heads' outputs [B, T, H, V] after the convolution of q, k and v, if
there is one; `ORACLES` has them with norm, gate and output matrix.

Written from the formulas in the mechanisms' docstrings, with no code shared
with `model`, and on purpose without any chunk, scan or cache. An oracle takes
the layer (for its configuration alone), its parameters and buffers in float64,
and x [B, T, D]; it returns the output and the state after T tokens.

Here are the mechanisms with positive features and one denominator, and the
softmax baseline; `oracles_exponential` has those with exponential features,
`oracles_decay` those with a decay and an output norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention.base import Attention, State
from tests.model.attention.oracles_decay import delta, dijiang, gated, normed, retnet
from tests.model.attention.oracles_exponential import (
    efficient,
    performer,
    rbf,
    soft_vq,
    vq,
    window_linear,
)
from tests.model.attention.projections import (
    Oracle,
    Weights,
    distance,
    future,
    heads,
    option,
    projected,
    qkv,
    rotated,
    with_parts,
)

__all__ = ["ORACLES", "Oracle", "heads"]


def elu(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = projected(layer, weights, x)
    num, den, state = positive(layer, F.elu(q) + 1, F.elu(k) + 1, v)
    return divided(layer, num, den + 1e-6), state


def relu(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = projected(layer, weights, x)
    num, den, state = positive(layer, q.relu(), k.relu(), v)
    return divided(layer, num, den.clamp_min(1e-6)), state


def softmax_map(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = projected(layer, weights, x)
    num, den, state = positive(layer, q.softmax(-1), k.softmax(-1), v)
    return divided(layer, num, den.clamp_min(1e-6)), state


def cosine(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = projected(layer, weights, x)
    if option(layer, "unit_length", default=True):
        q = q / q.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        k = k / k.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    else:
        q, k = q * q.shape[-1] ** -0.25, k * k.shape[-1] ** -0.25
    order, c = option(layer, "order", 1), torch.einsum("bihk,bjhk->bhij", q, k)
    weight = (1 + c + (c * c / 2 if order == 2 else 0)).tril()
    state = taylor_sums(k, v, order)
    if option(layer, "denominator", "weights") == "tokens":
        del state["z"]
    num = torch.einsum("bhij,bjhv->bihv", weight, v)
    den = weight.sum(-1).transpose(1, 2).unsqueeze(-1)
    return divided(layer, num, den.clamp_min(1e-6)), state


def taylor_sums(k: Tensor, v: Tensor, order: int) -> State:
    """Of the features 1, k_i and, for order 2, k_i^2 / sqrt(2) and k_i k_j by the gap j - i."""
    ones, dim = torch.ones_like(k[..., :1]), k.shape[-1]
    features = [ones, k]
    if order == 2:
        squares = torch.einsum("bthi,bthj->bthij", k, k)
        diagonals = [squares.diagonal(gap, -2, -1) for gap in range(dim)]
        features += [diagonals[0] / math.sqrt(2), *diagonals[1:]]
    phi = torch.cat(features, dim=-1)
    return {"S": torch.einsum("bjhf,bjhv->bhfv", phi, v), "z": phi.sum(1)}


def divided(layer: Attention, num: Tensor, den: Tensor) -> Tensor:
    """By the sum of the weights, or by the number of tokens so far."""
    if option(layer, "denominator", "weights") == "tokens":
        return num / torch.arange(1, num.shape[1] + 1)[:, None, None]
    return num / den


def positive(
    layer: Attention, phi_q: Tensor, phi_k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, State]:
    """Numerator, denominator and state; the numerator's features may be rotated "after"."""
    scores = torch.einsum("bihf,bjhf->bhij", phi_q, phi_k).tril()
    den = scores.sum(-1).transpose(1, 2).unsqueeze(-1)
    state = {"z": phi_k.sum(1)} if option(layer, "denominator", "weights") == "weights" else {}
    if option(layer, "rotary", "none") == "after":
        phi_q, phi_k = rotated(layer, phi_q, phi_k)
        scores = torch.einsum("bihf,bjhf->bhij", phi_q, phi_k).tril()
    state["S"] = torch.einsum("bjhf,bjhv->bhfv", phi_k, v)
    return torch.einsum("bhij,bjhv->bihv", scores, v), den, state


def cosformer(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    """Keys of the query's own epoch of M/2 tokens and of the one before it, older ones dropped."""
    horizon, length = option(layer, "horizon", 4096), x.shape[1]
    q, k, v = heads(qkv(weights, x), layer)
    q, k = q.relu(), k.relu()
    epoch = torch.arange(length) // (horizon // 2)
    age = epoch.unsqueeze(1) - epoch  # of key j's epoch, seen from query i
    seen = (distance(length) >= 0) & (age <= 1)
    weight = torch.cos(math.pi / 2 * distance(length).double() / horizon) * seen
    scores = torch.einsum("bihk,bjhk,ij->bhij", q, k, weight)
    num = torch.einsum("bhij,bjhv->bihv", scores, v)
    den = scores.sum(-1).transpose(1, 2).unsqueeze(-1).clamp_min(1e-6)

    angle = math.pi / 2 * (torch.arange(length) % (4 * horizon)).double() / horizon
    angle = angle.view(-1, 1, 1)
    phi = torch.cat([k * angle.cos(), k * angle.sin()], dim=-1)
    state = {}
    for suffix, rows in (("", age[-1] == 0), ("_before", age[-1] == 1)):
        state["S" + suffix] = torch.einsum("bjhf,bjhv->bhfv", phi[:, rows], v[:, rows])
        state["z" + suffix] = phi[:, rows].sum(1)
    return num / den, state


def softmax(layer: Attention, weights: Weights, x: Tensor) -> tuple[Tensor, State]:
    q, k, v = projected(layer, weights, x)
    scores = torch.einsum("bihk,bjhk->bhij", q, k) / math.sqrt(q.shape[-1])
    p = torch.softmax(scores.masked_fill(future(x.shape[1]), -math.inf), dim=-1)
    o = torch.einsum("bhij,bjhv->bihv", p, v)
    return o, {"k": k.transpose(1, 2), "v": v.transpose(1, 2)}


CORES: dict[str, Oracle] = {
    "cosformer": cosformer,
    "cosine": cosine,
    "delta": delta,
    "dijiang": dijiang,
    "efficient": efficient,
    "elu": elu,
    "gated": gated,
    "normed": normed,
    "performer": performer,
    "rbf": rbf,
    "relu": relu,
    "retnet": retnet,
    "soft_vq": soft_vq,
    "softmax": softmax,
    "softmax_map": softmax_map,
    "vq": vq,
    "window_linear": window_linear,
}


ORACLES: dict[str, Oracle] = {name: with_parts(core) for name, core in CORES.items()}
