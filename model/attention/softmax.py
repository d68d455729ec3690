"""The baseline: causal softmax attention with rotary positions and a cache that grows.

    o_t = sum_{j <= t} softmax_j(R_t q_t . R_j k_j / sqrt(K)) v_j

R_t is the rotation of `model.ops.rotary` with base ``rope_theta``; with
``rotary`` "none" there is none, for checkpoints with learned positions.

Here to be measured against. Its state, the keys and values of all tokens so
far, is not constant, so the server refuses it; `state_spec` gives the cache of
an empty text, and `chunk` and `step` return a longer one each time.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import Attention, Losses, State, TensorSpec
from model.config import ConfigError, ModelConfig
from model.ops.rotary import rotate


class SoftmaxAttention(Attention):
    """See the module's docstring. All sessions of one batch have texts of one length.

    Options: ``rotary`` ("before" or "none"), ``rope_theta``.
    """

    constant_state: ClassVar[bool] = False
    options: ClassVar[dict[str, object]] = {"rotary": "before", "rope_theta": 10_000.0}
    allowed: ClassVar[dict[str, tuple[object, ...]]] = {
        "rotary": ("before", "none"),
        "rope_theta": (2.0, 1e12),
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads = (config.num_attention_heads, config.head_dim)
        width = config.num_attention_heads * config.head_dim
        self.rotary = self.option(config, "rotary") != "none"
        self.rope_theta: float = self.option(config, "rope_theta")
        self.qkv = nn.Linear(config.hidden_size, 3 * width, bias=config.attention_bias)
        self.out = nn.Linear(width, config.hidden_size, bias=config.attention_bias)

    @classmethod
    def check_options(cls, config: ModelConfig) -> None:
        super().check_options(config)
        if config.head_dim % 2 and cls.option(config, "rotary") != "none":
            raise ConfigError(f"head_dim must be even for rotary positions, not {config.head_dim}")

    @classmethod
    def state_spec(cls, config: ModelConfig) -> dict[str, TensorSpec]:
        empty = TensorSpec((config.num_attention_heads, 0, config.head_dim))
        return {"k": empty, "v": empty}

    def parallel(self, x: Tensor, losses: Losses = None) -> Tensor:
        start = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        q, k, v = self._project(x, start)
        return self._output(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        q, k, v = self._project(x, position)
        num_past, num_new = state["k"].shape[2], x.shape[1]
        k = torch.cat([state["k"].to(k.dtype), k], dim=2)
        v = torch.cat([state["v"].to(v.dtype), v], dim=2)
        mask = torch.ones(num_new, num_past + num_new, dtype=torch.bool, device=x.device)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.tril(num_past))
        return self._output(o), {"k": k.float(), "v": v.float()}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        y, state = self.chunk(x.unsqueeze(1), state, position)
        return y.squeeze(1), state

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [B, H, T, K], q and k rotated."""
        positions = position.unsqueeze(1) + torch.arange(x.shape[1], device=x.device)
        q, k, v = self.qkv(x).unflatten(-1, (3, *self.heads)).unbind(-3)
        if self.rotary:
            q, k = (rotate(t, positions, self.rope_theta) for t in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _output(self, o: Tensor) -> Tensor:
        return self.out(o.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]
