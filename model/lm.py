"""Our own language model: embedding, blocks of attention and MLP, logits.

A block is ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.network import ModelState, Network
from model.attention.base import Losses, State, mechanism, token_positions
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


class LanguageModel(Network):
    """Token ids to logits. Weights are uninitialised until `init_weights` or a checkpoint."""

    config: ModelConfig

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.max_position_embeddings:
            self.position_embedding = nn.Embedding(
                config.max_position_embeddings, config.hidden_size
            )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = make_norm(config)
        if not config.tie_word_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def hidden_parallel(self, tokens: Tensor, losses: Losses = None) -> Tensor:
        """`parallel` without the head: the normed output of the last block, [B, T, D]."""
        x = self._embed(tokens, torch.arange(tokens.shape[1], device=tokens.device))
        for block in self._blocks():
            x = block.parallel(x, losses)
        return self.norm(x)  # type: ignore[no-any-return]

    def hidden_chunk(
        self, tokens: Tensor, state: ModelState, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, ModelState]:
        """`chunk` without the head."""
        x, new_state = self._embed(tokens, token_positions(position, tokens.shape[1])), []
        for block, layer_state in zip(self._blocks(), state, strict=True):
            x, layer_state = block.chunk(x, layer_state, position, losses)
            new_state.append(layer_state)
        return self.norm(x), tuple(new_state)

    def hidden_step(
        self, tokens: Tensor, state: ModelState, position: Tensor
    ) -> tuple[Tensor, ModelState]:
        """`step` without the head: [B, D] and the new state."""
        x, new_state = self._embed(tokens, position), []
        for block, layer_state in zip(self._blocks(), state, strict=True):
            x, layer_state = block.step(x, layer_state, position)
            new_state.append(layer_state)
        return self.norm(x), tuple(new_state)

    @torch.no_grad()
    def attention_pairs(self, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What goes into each layer's attention and what comes out, [B, T, D] each, in order."""
        x = self._embed(tokens, torch.arange(tokens.shape[1], device=tokens.device))
        for block in self._blocks():
            inputs = block.attention_norm(x)
            outputs = block.attention.parallel(inputs)
            yield inputs, outputs
            x = block.with_mlp(x, outputs)

    @property
    def head_weight(self) -> Tensor:
        """[vocabulary, D]; the embedding itself where the two are tied."""
        return self.embedding.weight if self.config.tie_word_embeddings else self.head.weight

    def empty_state(self, batch: int, device: torch.device | None = None) -> ModelState:
        """The state before any token: all zeros."""
        device = device or self.embedding.weight.device
        return tuple(block.attention.empty_state(batch, device) for block in self._blocks())

    def init_weights(self, generator: torch.Generator) -> None:
        """See `Network`. Normal, of deviation ``1/sqrt(fan_in)``; those into the residual are zero.

        A zero output matrix makes every block the identity at first, which is
        where a deep residual network trains best from.
        """
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                if name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                elif parameter.dim() < 2 or name.endswith(("attention.out.weight", "down.weight")):
                    parameter.zero_()
                elif name.endswith("embedding.weight"):
                    parameter.normal_(0.0, 0.02, generator=generator)
                else:
                    parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[1]), generator=generator)
        for block in self._blocks():
            block.attention.reset_parameters(generator)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The embeddings of ``tokens``, plus those of ``positions`` where there is a table."""
        x = self.embedding(tokens)
        if self.config.max_position_embeddings:
            last = self.config.max_position_embeddings - 1
            x = x + self.position_embedding(positions.clamp_max(last))
        return x  # type: ignore[no-any-return]

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]
