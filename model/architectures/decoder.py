"""A decoder of pre-norm blocks: ``x + mixer(norm(x))``, then ``x + mlp(norm(x))`` if it has one.

In some families what a mixer and an MLP give is normed too, before it is added. Where a config has
a ``residual_scale``, what is added is times it, and embeddings are times its ``embedding_scale``.

Most published families are this body with token mixers of their own, and differ in nothing else.
A family gives one mixer per layer; the weights' names are those of `model.architectures.
decoder_shapes`.

`BoundedAttention` is the mixer of several families: softmax attention over a bounded past, in
torch, the reference of the native kernel. It has grouped queries, rotary positions of the first
channels, and where the family has them a norm of each query and key, biases, and a sigmoid gate of
the output, of each channel or of each head. What the past keeps is `model.architectures.hybrid`'s,
in 16 bits where the state is. A query sees the first positions, the sinks, no farther away than
``farthest``: at a bound as if the text began right before the others that it sees. Without sinks
the past is the last ``context`` positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.config import Config
from model.architectures.hybrid import SINKS, HybridConfig, mlp_size
from model.architectures.network import Losses, ModelState, Network, State
from model.ops.fused import RMSNorm
from model.tensor_spec import POSITION_BLOCK


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


class BoundedAttention(Mixer):
    """See the module. ``rotary_dim`` channels of ``head_dim`` turn; half of them with the other.

    ``rope_factors`` [rotary_dim / 2] divide the frequencies of the pairs; none is all one, and a
    pair of factor infinity does not turn. ``farthest`` is ``context`` where it is not given.
    ``score_scale`` multiplies the scores; 0 is ``head_dim ** -0.5``.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rotary_dim: int,
        rope_theta: float,
        eps: float,
        context: int,
        gated: bool = False,
        head_gates: bool = False,
        qk_norm: bool = True,
        qkv_bias: bool = False,
        out_bias: bool = False,
        rope_factors: Sequence[float] = (),
        farthest: int = 0,
        score_scale: float = 0.0,
        sinks: int = SINKS,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rotary_dim, self.rope_theta, self.rope_factors = rotary_dim, rope_theta, rope_factors
        self.gated, self.context, self.farthest = gated, context, farthest or context
        self.score_scale = score_scale or head_dim**-0.5
        self.sinks = sinks
        rows = num_heads * head_dim * (2 if gated else 1)
        self.q = nn.Linear(width, rows, bias=qkv_bias)
        self.k = nn.Linear(width, num_kv_heads * head_dim, bias=qkv_bias)
        self.v = nn.Linear(width, num_kv_heads * head_dim, bias=qkv_bias)
        self.gate = nn.Linear(width, num_heads, bias=False) if head_gates else None
        self.out = nn.Linear(num_heads * head_dim, width, bias=out_bias)
        self.q_norm = nn.RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps) if qk_norm else None

    @classmethod
    def of(cls, config: HybridConfig, **options: Any) -> Self:
        """That of a family's layers; ``options`` are arguments that the config does not decide."""
        decided = {
            "rope_theta": config.rope_theta,
            "eps": config.norm_eps,
            "context": config.context,
            "gated": config.gated,
            "qk_norm": config.qk_norm,
        }
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        return cls(config.hidden_size, *heads, **{**decided, **options})

    def forward(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        """See `Mixer`."""
        q, gate = self._heads(self.q(x), self.num_heads), None
        if self.gated:
            q, gate = q.chunk(2, dim=-1)
        elif self.gate is not None:
            gate = self.gate(x)[..., None]
        k = _normed(self._heads(self.k(x), self.num_kv_heads), self.k_norm)
        # What is kept is rounded, so that a token sees the same of those next to it and before.
        v = self._heads(self.v(x), self.num_kv_heads).to(state["v"].dtype).float()
        q = _normed(q, self.q_norm)
        at = position[:, None] + torch.arange(x.shape[1], device=x.device)  # [B, T]
        k = self.rotate(k, at).to(state["k"].dtype).float()
        y = self._attend(q, k, v, state, position, at)
        y, after = self.with_far(y, q, k, v, state, position, at)
        if gate is not None:
            # By logsigmoid: sigmoid rounds differently in a vector loop and in its rest.
            y = y * F.logsigmoid(gate.float()).exp()
        return self.out(y.flatten(-2).to(x.dtype)), after | self._kept(k, v, state, position, at)

    def with_far(
        self,
        y: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        position: Tensor,
        at: Tensor,
    ) -> tuple[Tensor, State]:
        """For a subclass that sums what the past does not hold; its output and that state.

        ``y`` is the output over the past; k is rotated and q is not.
        """
        return y, {}

    def _heads(self, x: Tensor, num: int) -> Tensor:
        heads: Tensor = x.unflatten(-1, (num, -1))
        return heads

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """[B, T, H, F] at positions [B, T]."""
        half = self.rotary_dim // 2
        exponent = torch.arange(half, dtype=torch.float64, device=x.device) / half
        frequencies = self.rope_theta**-exponent
        if self.rope_factors:
            frequencies = frequencies / torch.tensor(
                self.rope_factors, dtype=torch.float64, device=x.device
            )
        angle = at.double()[..., None] * frequencies
        cos, sin = angle.cos().to(x.dtype)[:, :, None], angle.sin().to(x.dtype)[:, :, None]
        a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State, position: Tensor, at: Tensor
    ) -> Tensor:
        """Queries [B, T, H, F], k and v [B, T, Hkv, F] of new tokens; the output like them."""
        used = -(-min(int(position.max()), self.context) // POSITION_BLOCK)
        keys, values = (
            torch.cat([held.float(), new], dim=1)
            for held, new in zip(past_rows(state, used), (k, v), strict=True)
        )
        held = self._positions(position)[:, : used * POSITION_BLOCK]
        places = torch.cat([held, at], dim=1)[:, None]  # [B, 1, N + T]
        oldest = at[..., None] - (self.context - self.sinks)
        seen = (places >= 0) & (places <= at[..., None])
        seen &= (places < self.sinks) | (places > oldest)
        group = self.num_heads // self.num_kv_heads
        keys, values = (x.repeat_interleave(group, dim=2) for x in (keys, values))
        scores = torch.einsum("bthf,bnhf->bhtn", self.rotate(q, at), keys)
        nearest = at.clamp(max=self.farthest - 1)
        if self.sinks and bool((nearest != at).any()):
            to_sinks = torch.einsum("bthf,bnhf->bhtn", self.rotate(q, nearest), keys)
            scores = torch.where((places < self.sinks)[:, None], to_sinks, scores)
        scores = (scores * self.score_scale).masked_fill(~seen[:, None], -torch.inf)
        return torch.einsum("bhtn,bnhf->bthf", scores.softmax(dim=-1), values)

    def _positions(self, position: Tensor) -> Tensor:
        """[B] tokens seen to the position that each place holds [B, N]; -1 where it holds none."""
        num_places = -(-self.context // POSITION_BLOCK) * POSITION_BLOCK
        place = torch.arange(num_places, device=position.device)
        ring = self.context - self.sinks
        turns = torch.div(position[:, None] - 1 - place, ring, rounding_mode="floor")
        turns = torch.where(place < self.sinks, turns.clamp(max=0), turns)
        is_held = (position[:, None] > place) & (place < self.context)
        return torch.where(is_held, place + turns * ring, -1)

    def _kept(self, k: Tensor, v: Tensor, state: State, position: Tensor, at: Tensor) -> State:
        """The state with new tokens in their places."""
        held = self._positions(at[:, -1] + 1)
        new = (held - position[:, None]).clamp(min=0)[..., None, None]
        is_new = (held >= position[:, None])[..., None, None]

        def kept(old: Tensor, rows: Tensor) -> Tensor:
            rows = rows.to(old.dtype)
            return torch.where(is_new, rows.gather(1, new.expand(-1, -1, *rows.shape[2:])), old)

        old_keys, old_values = past_rows(state)
        keys, values = kept(old_keys, k), kept(old_values, v)
        return {"k": _blocks(keys).transpose(-1, -2), "v": _blocks(values)}


def _normed(heads: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    """In float32, whatever the products and the weights are."""
    if norm is None:
        return heads.float()
    return F.rms_norm(heads.float(), norm.weight.shape, norm.weight.float(), norm.eps)


def past_rows(state: State, num_blocks: int | None = None) -> tuple[Tensor, Tensor]:
    """Keys and values [B, N, H, F] of the first blocks, or of all."""
    return _rows(state["k"][:, :num_blocks].transpose(-1, -2)), _rows(state["v"][:, :num_blocks])


def _rows(blocks: Tensor) -> Tensor:
    """[B, blocks, H, positions, F] to [B, N, H, F]."""
    return blocks.transpose(2, 3).flatten(1, 2)


def _blocks(rows: Tensor) -> Tensor:
    """The inverse of `_rows`."""
    blocks: Tensor = rows.unflatten(1, (-1, POSITION_BLOCK))
    return blocks.transpose(2, 3)
