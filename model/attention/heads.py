"""What most mechanisms share: q, k and v of H heads from one matrix, and one matrix after them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import Attention
from model.attention.spec import AttentionConfig, key_dim
from model.ops.fused.gated_norm import gated_rms_norm
from model.ops.linear import FusedLinear
from model.ops.rotary import rotate


class HeadsAttention(Attention):
    """An attention with weights ``qkv`` [H (2 K + V), D] and ``out`` [D, H V].

    K is `model.attention.spec.key_dim`, V is ``config.head_dim``. Options where a
    mechanism has them: ``rotary``, of which "before" rotates q and k before any feature map,
    and ``rope_theta``, the base of the rotation's frequencies.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.num_heads, self.key_width = config.num_attention_heads, key_dim(config, self.options)
        width = self.num_heads * config.head_dim
        keys = self.num_heads * self.key_width
        self.qkv = FusedLinear(config.hidden_size, (keys, keys, width), config.attention_bias)
        self.out = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.rotary: str = self.options.get("rotary", "none")
        if "rope_theta" in self.options:
            self.rope_theta: float = self.options["rope_theta"]

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., D] and [...] to q, k [..., H, K] and v [..., H, V] in float32."""
        q, k, v = self._heads(self.qkv(x))
        if self.rotary == "before":
            q, k = self._rotate(q, k, positions)
        return q, k, v

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, positions, self.rope_theta), rotate(k, positions, self.rope_theta)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.float().split(self.qkv.parts, dim=-1)
        return (
            q.unflatten(-1, (self.num_heads, -1)),
            k.unflatten(-1, (self.num_heads, -1)),
            v.unflatten(-1, (self.num_heads, -1)),
        )

    def _merge(self, o: Tensor, dtype: torch.dtype) -> Tensor:
        """The heads' outputs [..., H, V] to [..., D]."""
        return self.out(o.flatten(-2).to(dtype))  # type: ignore[no-any-return]


class GatedOutputAttention(HeadsAttention):
    """Instead of a denominator: ``out(rms_norm(num) * norm_weight * silu(gate(x)))``.

    Without ``gate`` where a mechanism has an option of this name that is false.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        width = config.num_attention_heads * config.head_dim
        self.gate: nn.Linear | None = None
        if self.options.get("gate", True):
            self.gate = nn.Linear(config.hidden_size, width, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(config.head_dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            self.norm_weight.fill_(1.0)

    def _gated_output(self, num: Tensor, x: Tensor) -> Tensor:
        """The sums [..., H, V] and the layer's input [..., D] to [..., D]."""
        if self.gate is None:
            weight, eps = self.norm_weight, self.config.rms_norm_eps
            return self._merge(F.rms_norm(num.float(), weight.shape, weight.float(), eps), x.dtype)
        gate = self.gate(x).unflatten(-1, num.shape[-2:])
        return self.out(self._gated_norm(num, gate).flatten(-2))  # type: ignore[no-any-return]

    def _gated_norm(self, num: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(num, self.norm_weight, gate, self.config.rms_norm_eps)


def token_positions(position: Tensor, num_tokens: int) -> Tensor:
    """The positions [B, T] of T tokens after ``position`` [B] tokens."""
    return position.unsqueeze(1) + torch.arange(num_tokens, device=position.device)
