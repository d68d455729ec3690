"""Linear Transformer: ``phi(x) = elu(x) + 1`` (Katharopoulos et al. 2020, eq. 7).

    o_t = phi(q_t)^T S_t / (phi(q_t)^T z_t + 1e-6)

No scaling of q and k, as in the paper. State per layer: S [H, K, V], z [H, K].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import Attention, Losses, State, TensorSpec
from model.config import ModelConfig
from model.ops.recurrence import normalized_chunk, normalized_step

EPSILON = 1e-6


def feature_map(x: Tensor) -> Tensor:
    """Positive features in float32: elu(x) + 1."""
    return F.elu(x.float()) + 1.0


class EluAttention(Attention):
    """See the module's docstring."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads = (config.num_attention_heads, config.head_dim)
        width = config.num_attention_heads * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * width, bias=False)
        self.out = nn.Linear(width, config.hidden_size, bias=False)

    @classmethod
    def state_spec(cls, config: ModelConfig) -> dict[str, TensorSpec]:
        heads, dim = config.num_attention_heads, config.head_dim
        return {"S": TensorSpec((heads, dim, dim)), "z": TensorSpec((heads, dim))}

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        num, den, s, z = normalized_chunk(*self._project(x), state["S"], state["z"])
        return self._output(num, den, x.dtype), {"S": s, "z": z}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        num, den, s, z = normalized_step(*self._project(x), state["S"], state["z"])
        return self._output(num, den, x.dtype), {"S": s, "z": z}

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, *self.heads)).unbind(-3)
        return feature_map(q), feature_map(k), v.float()

    def _output(self, num: Tensor, den: Tensor, dtype: torch.dtype) -> Tensor:
        o = num / (den.unsqueeze(-1) + EPSILON)
        return self.out(o.flatten(-2).to(dtype))  # type: ignore[no-any-return]
