"""The exact part of a layer: softmax over the last W tokens and the first ones of the text.

    o_i = sum_j softmax_j(q_i . k_j / sqrt(K)) v_j,   over j <= i with i - j < W or j < sinks

Time and memory are linear in the number of tokens: blocks of C queries see W + C keys, of which
the mask keeps W, and the first keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model.convert.linearize.network import full_attention

#: Queries in a block, if the window is that long and there are as many.
MIN_BLOCK, MAX_BLOCK = 32, 256


def near_attention(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int) -> Tensor:
    """Rotated q [B, H, T, K] and k, v [B, H_kv, T, K] to o [B, H, T, K]."""
    num_tokens = q.shape[2]
    head = full_attention(*(t[:, :, :window] for t in (q, k, v)))
    if num_tokens <= window:
        return head
    block = block_size(window, num_tokens - window)
    group = q.shape[1] // k.shape[1]
    q, keys, values = (F.pad(t, (0, 0, 0, -(num_tokens - window) % block)) for t in (q, k, v))
    # Queries of one group lie under each other, because they see the same keys.
    rows = q[:, :, window:].unflatten(1, (-1, group)).unflatten(3, (-1, block))
    rows = rows.transpose(2, 3).flatten(3, 4)  # [B, H_kv, N, G C, K]
    keys, values = (_seen(t, block, window, sinks) for t in (keys, values))
    scores = (rows * q.shape[-1] ** -0.5) @ keys.transpose(-1, -2)
    mask = _mask(scores.shape[2], block, window, sinks, q.device)
    scores = scores.unflatten(3, (group, block)).masked_fill(~mask.unsqueeze(1), -torch.inf)
    o = scores.softmax(dim=-1).flatten(3, 4) @ values
    o = o.unflatten(3, (group, block)).transpose(2, 3).flatten(1, 2).flatten(2, 3)
    return torch.cat([head, o[:, :, : num_tokens - window]], dim=2)


def block_size(window: int, num_queries: int) -> int:
    """The largest divisor of ``window`` that a block of ``num_queries`` may have."""
    most = min(window, MAX_BLOCK, max(MIN_BLOCK, num_queries))
    return max(size for size in range(1, most + 1) if window % size == 0)


def _seen(x: Tensor, block: int, window: int, sinks: int) -> Tensor:
    """What each block of queries sees of keys or values [B, H_kv, T, K].

    The first block begins at position ``window``. Returns [B, H_kv, N, W + C + sinks, K].
    """
    blocks = x.unflatten(2, (-1, block))
    num_before = window // block
    num_blocks = blocks.shape[2] - num_before
    around = [blocks[:, :, start : start + num_blocks] for start in range(num_before + 1)]
    first = x[:, :, None, :sinks].expand(-1, -1, num_blocks, -1, -1)
    return torch.cat([*around, first], dim=3)


def _mask(num_blocks: int, block: int, window: int, sinks: int, device: torch.device) -> Tensor:
    """[N, C, W + C + sinks] bool, of what `_seen` gives: what a query attends to."""
    query = window + torch.arange(num_blocks * block, device=device).view(num_blocks, block, 1)
    start = torch.arange(num_blocks, device=device).view(-1, 1, 1) * block
    distance = query - start - torch.arange(window + block, device=device)
    near = (distance >= 0) & (distance < window)
    # Each of the first tokens once: by itself as soon as the window has left it.
    first = query - torch.arange(sinks, device=device) >= window
    return torch.cat([near, first], dim=-1)
