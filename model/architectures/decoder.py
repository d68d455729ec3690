"""A decoder of pre-norm blocks: ``x + mixer(norm(x))``, then ``x + mlp(norm(x))`` if it has one.

In some families what a mixer and an MLP give is normed too, before it is added. Where a config has
a ``residual_scale``, what is added is times it, and embeddings are times its ``embedding_scale``.

Most published families are this body with token mixers of their own, and differ in nothing else.
A family gives one mixer per layer; the weights' names are those of `model.architectures.
decoder_shapes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.config import Config
from model.architectures.hybrid import mlp_size
from model.architectures.network import Losses, ModelState, Network, State
from model.ops.fused import RMSNorm


class Mixer(nn.Module, ABC):
    """Mixes the tokens of one layer. The state's tensors are those of `Config.layer_states`."""

    @abstractmethod
    def forward(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        """[B, T, D] with the state of ``position`` [B] tokens; as much and the new state.

        Any cut of T gives the same up to rounding. Arguments are not changed.
        """


class SwiGlu(nn.Module):
    """``(silu(x W_gate) * x W_up) W_down`` (Shazeer 2020, "GLU Variants", eq. 6)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return inner


class DecoderBlock(nn.Module):
    """One layer; without an MLP where ``inner`` is 0. ``scale`` is that of what is added."""

    def __init__(
        self,
        width: int,
        inner: int,
        eps: float,
        mixer: nn.Module,
        scale: float = 1.0,
        post_norms: bool = False,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.mixer_norm = RMSNorm(width, eps)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(width, eps) if inner else None
        self.mlp = SwiGlu(width, inner) if inner else None
        self.mixer_post_norm = RMSNorm(width, eps) if post_norms else None
        self.mlp_post_norm = RMSNorm(width, eps) if post_norms else None

    def forward(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        y, state = self.mixer(self.mixer_norm(x), state, position)
        if self.mixer_post_norm is not None:
            y = self.mixer_post_norm(y.to(x.dtype))  # under autocast products have 16 bits
        return self.rest(x + scaled(y, self.scale)), state

    def rest(self, x: Tensor) -> Tensor:
        """What follows the mixer."""
        if self.mlp is not None and self.mlp_norm is not None:
            y = self.mlp(self.mlp_norm(x))
            if self.mlp_post_norm is not None:
                y = self.mlp_post_norm(y.to(x.dtype))
            x = x + scaled(y, self.scale)
        return x


def scaled(x: Tensor, scale: float) -> Tensor:
    """``x * scale``, and ``x`` itself where the scale is 1."""
    return x if scale == 1.0 else x * scale


class Decoder(Network):
    """See `Network`; a family's network calls this with its mixers."""

    def __init__(
        self,
        config: Config,
        mixers: Sequence[nn.Module],
        eps: float,
        tied: bool,
        post_norms: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        width, inner = config.hidden_size, mlp_size(config)
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.embedding_scale: float = getattr(config, "embedding_scale", 1.0)
        scale: float = getattr(config, "residual_scale", 1.0)
        blocks = (DecoderBlock(width, inner, eps, mixer, scale, post_norms) for mixer in mixers)
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(width, eps)
        self.head = None if tied else nn.Linear(width, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def hidden_chunk(
        self, tokens: Tensor, state: ModelState, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, ModelState]:
        """See `Network`."""
        x, after = scaled(self.embedding(tokens), self.embedding_scale), []
        for block, layer in zip(self.blocks, state, strict=True):
            x, layer = block(x, layer, position)
            after.append(layer)
        return self.norm(x), tuple(after)

    def hidden_step(
        self, tokens: Tensor, state: ModelState, position: Tensor
    ) -> tuple[Tensor, ModelState]:
        """See `Network`."""
        x, state = self.hidden_chunk(tokens.unsqueeze(1), state, position)
        return x.squeeze(1), state

    def init_weights(self, generator: torch.Generator) -> None:
        """Normal, 0.02; norms one. What writes to the residual stream is smaller with depth.

        Mixers with weights of other kinds set them in ``init_weights`` of their own.
        """
        scale = 0.02 / (2 * len(self.blocks)) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif parameter.dim() >= 2:
                is_output = name.endswith((".out.weight", ".down.weight"))
                nn.init.normal_(parameter, 0.0, scale if is_output else 0.02, generator=generator)
            else:
                nn.init.zeros_(parameter)
        for block in self.blocks:
            init = getattr(block.mixer, "init_weights", None)
            if init is not None:
                init(generator)
