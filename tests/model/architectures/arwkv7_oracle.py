"""ARWKV token by token in float64, from the published equations and names.

The time mix is that of `tests.model.architectures.rwkv7_oracle`, the rest Qwen2 without attention.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.model.architectures.rwkv7_oracle import time_mix
from tests.rwkv7 import Published

EPS = 1e-6


def oracle(weights: Published, tokens: list[int]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Logits [T, V] of one text, and S [H, value, key] and the shift row of each layer."""
    z = {key: tensor.detach().double().squeeze() for key, tensor in weights.items()}
    mix = "model.layers.{}.self_attn.time_mixer."
    heads, dim = weights[mix.format(0) + "r_k"].shape
    layers = 1 + max(int(key.split(".")[2]) for key in z if key.startswith("model.layers."))
    width = heads * dim
    state = [
        {
            "S": torch.zeros(heads, dim, dim, dtype=torch.float64),
            "time_shift": torch.zeros(width, dtype=torch.float64),
        }
        for _ in range(layers)
    ]
    head = z.get("lm_head.weight", z["model.embed_tokens.weight"])
    logits = []
    for token in tokens:
        x, v_first = z["model.embed_tokens.weight"][token], torch.zeros(width)
        for layer in range(layers):
            block, prefix = f"model.layers.{layer}.", mix.format(layer)
            own = {k.removeprefix(prefix): t for k, t in z.items() if k.startswith(prefix)}
            h = norm(x, z[block + "input_layernorm.weight"])
            y, v_first = time_mix(own, layer, h, state[layer], v_first, heads, dim)
            x = x + y
            h = norm(x, z[block + "post_attention_layernorm.weight"])
            gate, up, down = (
                z[f"{block}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            x = x + down @ (F.silu(gate @ h) * (up @ h))
        logits.append(head @ norm(x, z["model.norm.weight"]))
    return torch.stack(logits), state


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean() + EPS) * weight
