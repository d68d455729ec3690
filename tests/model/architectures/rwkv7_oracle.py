"""RWKV-7 token by token in float64, from the published equations and names.

Written apart from `model.families.rwkv7`, with S as [value, key] like the equations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.rwkv7 import Published


def oracle(
    weights: Published, tokens: list[int], tuned: Published | None = None
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Logits [T, V] of one text, and S [H, value, key] and the shift rows of each layer.

    ``tuned`` has what S of each layer begins with, as files of tuned states do.
    """
    z = {key: tensor.detach().double().squeeze() for key, tensor in weights.items()}
    heads, dim = weights["blocks.0.att.r_k"].shape
    layers = 1 + max(int(key.split(".")[1]) for key in z if key.startswith("blocks."))
    width = heads * dim
    state = [
        {
            "S": torch.zeros(heads, dim, dim, dtype=torch.float64),
            "time_shift": torch.zeros(width, dtype=torch.float64),
            "channel_shift": torch.zeros(width, dtype=torch.float64),
        }
        for _ in range(layers)
    ]
    for layer in range(layers) if tuned is not None else ():
        state[layer]["S"] = tuned[f"blocks.{layer}.att.time_state"].double()
    logits = []
    for token in tokens:
        x, v_first = norm(z, "blocks.0.ln0", z["emb.weight"][token]), torch.zeros(width)
        for layer in range(layers):
            s, prefix = state[layer], f"blocks.{layer}.att."
            att = {k.removeprefix(prefix): t for k, t in z.items() if k.startswith(prefix)}
            h = norm(z, f"blocks.{layer}.ln1", x)
            y, v_first = time_mix(att, layer, h, s, v_first, heads, dim)
            x = x + y
            h = norm(z, f"blocks.{layer}.ln2", x)
            ffn = f"blocks.{layer}.ffn."
            u = h + (s["channel_shift"] - h) * z[ffn + "x_k"]
            s["channel_shift"] = h
            x = x + z[ffn + "value.weight"] @ torch.relu(z[ffn + "key.weight"] @ u) ** 2
        logits.append(z["head.weight"] @ norm(z, "ln_out", x))
    return torch.stack(logits), state


def time_mix(
    z: Published,
    layer: int,
    h: Tensor,
    state: dict[str, Tensor],
    v_first: Tensor,
    heads: int,
    dim: int,
) -> tuple[Tensor, Tensor]:
    """Without a gate or a norm of the heads' outputs where ``z`` lacks its weights."""
    x = {c: h + (state["time_shift"] - h) * z[f"x_{c}"] for c in "rwkvag" if f"x_{c}" in z}
    state["time_shift"] = h
    r, k, v = (z[f"{name}.weight"] @ x[name[0]] for name in ("receptance", "key", "value"))
    w = torch.exp(-math.exp(-0.5) * torch.sigmoid(z["w0"] + torch.tanh(x["w"] @ z["w1"]) @ z["w2"]))
    a = torch.sigmoid(z["a0"] + x["a"] @ z["a1"] @ z["a2"])
    g = torch.sigmoid(x["g"] @ z["g1"]) @ z["g2"] if "g1" in z else torch.ones(heads * dim)
    if layer == 0:
        v_first = v
    else:
        v = v + (v_first - v) * torch.sigmoid(z["v0"] + x["v"] @ z["v1"] @ z["v2"])
    kappa = (k * z["k_k"]).view(heads, dim)
    kappa = kappa / kappa.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    k = k * (1 + (a - 1) * z["k_a"])
    r, w, k, v, a = (t.view(heads, dim) for t in (r, w, k, v, a))
    outputs = []
    for head in range(heads):
        s = state["S"][head]
        removed = torch.outer(s @ kappa[head], kappa[head] * a[head])
        s = s @ torch.diag(w[head]) - removed + torch.outer(v[head], k[head])
        state["S"][head] = s
        y = s @ r[head]
        if "ln_x.weight" in z:
            y = (y - y.mean()) / torch.sqrt(y.var(correction=0) + 64e-5)
            part = slice(head * dim, (head + 1) * dim)
            y = y * z["ln_x.weight"][part] + z["ln_x.bias"][part]
        outputs.append(y + (r[head] * k[head] * z["r_k"].view(heads, dim)[head]).sum() * v[head])
    return z["output.weight"] @ (torch.cat(outputs) * g), v_first


def norm(z: Published, key: str, x: Tensor) -> Tensor:
    x = (x - x.mean()) / torch.sqrt(x.var(correction=0) + 1e-5)
    return x * z[f"{key}.weight"] + z[f"{key}.bias"]
