"""One layer: attention and a gated MLP, each behind a norm and beside a residual path."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import mechanism
from model.attention.base import Losses, State
from model.config import ModelConfig


class SwiGLU(nn.Module):
    """``(silu(x W_1) * x W_2) W_3`` (Shazeer 2020, "GLU Variants", eq. 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)  # type: ignore[no-any-return]


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; the three forms share the weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = mechanism(config.attention)(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def parallel(self, x: Tensor, losses: Losses = None) -> Tensor:
        return self._mlp(x + self.attention.parallel(self.attention_norm(x), losses))

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        y, state = self.attention.chunk(self.attention_norm(x), state, position, losses)
        return self._mlp(x + y), state

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        y, state = self.attention.step(self.attention_norm(x), state, position)
        return self._mlp(x + y), state

    def _mlp(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]
