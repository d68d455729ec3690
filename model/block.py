"""One layer: attention and an MLP, each after a norm and with a residual path."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import Losses, State, mechanism
from model.config import ModelConfig
from model.ops.fused import RMSNorm, add_rms_norm, swiglu
from model.ops.layers import FusedLinear


class SwiGLU(nn.Module):
    """``(silu(x W_1) * x W_2) W_3`` (Shazeer 2020, "GLU Variants", eq. 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = FusedLinear(config.hidden_size, 2 * (config.intermediate_size,))
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.up(x)))  # type: ignore[no-any-return]


class GeluMLP(nn.Module):
    """``gelu(x W_1 + b_1) W_2 + b_2`` with the tanh form of the gelu, as in GPT-2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


def make_norm(config: ModelConfig) -> nn.Module:
    """A norm over the model's width, as ``config.norm`` names it."""
    if config.norm == "layer":
        return nn.LayerNorm(config.hidden_size, config.rms_norm_eps)
    return RMSNorm(config.hidden_size, config.rms_norm_eps)


def add_and_norm(norm: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """``x + y`` and its norm."""
    if isinstance(norm, RMSNorm):
        return add_rms_norm(x, y, norm.weight, norm.eps)  # type: ignore[arg-type]
    x = x + y
    return x, norm(x)


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; the three forms share the weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = mechanism(config.attention)(config)
        self.mlp_norm = make_norm(config)
        self.mlp = {"swiglu": SwiGLU, "gelu": GeluMLP}[config.mlp](config)

    def parallel(self, x: Tensor, losses: Losses = None) -> Tensor:
        return self.with_mlp(x, self.attention.parallel(self.attention_norm(x), losses))

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        y, state = self.attention.chunk(self.attention_norm(x), state, position, losses)
        return self.with_mlp(x, y), state

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        y, state = self.attention.step(self.attention_norm(x), state, position)
        return self.with_mlp(x, y), state

    def with_mlp(self, x: Tensor, y: Tensor) -> Tensor:
        """The block's input ``x`` and the attention's output ``y`` to the block's output."""
        x, normed = add_and_norm(self.mlp_norm, x, y)
        return x + self.mlp(normed)  # type: ignore[no-any-return]
