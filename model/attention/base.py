"""The contract that every attention mechanism keeps.

A mechanism has one definition and three forms of it, and for any split of a
sequence the forms agree on outputs and on the final state:

- ``parallel``  a whole sequence from the empty state, for training;
- ``chunk``     T tokens with a state carried in and out, for prefill;
- ``step``      one token, state in and out, for decoding.

Symbols: B batch, T tokens, D model width, H heads, K key features per head,
V value features per head. A mechanism owns its projections: it maps
``[B, T, D]`` to ``[B, T, D]``.

State is a flat ``dict`` of named tensors per layer, each ``[B, *shape]`` as
its spec says (`model.attention.specs`). **All zeros is the empty state**, for
every tensor of every mechanism; one that needs another start (a running
maximum, say) encodes it so that zero means "nothing yet". State is never stored below float32. Sums
that nothing decays are float64 and counters are integers, because a float32
sum stops taking in new tokens after 2**24 of them.

Most mechanisms are a `HeadsAttention`: q, k and v of H heads from one matrix, and one matrix after
them. Before the heads there may be a short causal convolution with a silu over q, k and v, after
them a norm of each head and a gate:

    o = rms_norm(o) * norm_weight,   o = o * silu(x W_gate),   y = o W_out
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.network import DTYPES, Losses, State
from model.attention import entry, spec_of
from model.attention.specs import AttentionConfig, key_dim
from model.ops.fused import convolved_silu, gated_rms_norm
from model.ops.layers import FusedLinear, convolution_step, rotate

__all__ = ["Attention", "Losses", "State", "mechanism"]


class Attention(nn.Module, ABC):
    """One layer of token mixing. Subclasses are listed in ``model.attention.MECHANISMS``."""

    #: Whether training changes buffers in the forward pass, which must then see whole batches.
    learns_in_forward: ClassVar[bool] = False

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config, self.spec = config, spec_of(config.attention)
        #: Every option of the mechanism, defaults filled in.
        self.options = self.spec.values(config)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Sets what should not start as `LanguageModel.init_weights` leaves it."""

    def empty_state(self, batch: int, device: torch.device) -> State:
        """Zeros of the spec's tensors, each ``[batch, *shape]``."""
        return {
            name: torch.zeros(batch, *tensor.shape, dtype=DTYPES[tensor.dtype], device=device)
            for name, tensor in self.spec.state_spec(self.config).items()
        }

    def parallel(self, x: Tensor, losses: Losses = None) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]`` from the empty state at position 0.

        Memory is linear in T. Unless a mechanism knows better, this is one
        `chunk` from the empty state.
        """
        position = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        return self.chunk(x, self.empty_state(x.shape[0], x.device), position, losses)[0]

    @abstractmethod
    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        """``[B, T, D]`` to ``[B, T, D]`` and the state after T tokens.

        ``position`` is ``[B]`` int64: how many tokens the state has seen. The
        argument ``state`` is not changed.
        """

    @abstractmethod
    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        """``[B, D]`` to ``[B, D]`` and the state after one token; otherwise like `chunk`."""


def mechanism(name: str) -> type[Attention]:
    """The class of the mechanism called ``name``. Raises `ConfigError` for an unknown name."""
    _, module, class_name = entry(name)
    cls: type[Attention] = getattr(import_module(module), class_name)
    return cls


class HeadsAttention(Attention):
    """An attention with weights ``qkv`` [H (2 K + V), D] and ``out`` [D, H V].

    K is `model.attention.specs.key_dim`, V is ``config.head_dim``. Options: ``conv_size`` W, the
    last W tokens, 0 for neither convolution nor silu, with the state conv [W - 1, H (2 K + V)];
    ``gate``; ``norm``, and a mechanism without this option always has a norm. Where a mechanism
    has them: ``rotary``, of which "before" rotates q and k before any feature map, and
    ``rope_theta``, the base of the rotation's frequencies; ``qk_norm``, which divides q and k of
    each head by their root mean square.
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
        self.conv_size: int = self.options["conv_size"]
        if self.conv_size:
            self.conv_weight = nn.Parameter(torch.zeros(self.qkv.out_features, self.conv_size))
        self.gate: nn.Linear | None = None
        if self.options["gate"]:
            self.gate = nn.Linear(config.hidden_size, width, bias=False)
        self.norm_weight: nn.Parameter | None = None
        if self.options.get("norm", True):
            self.norm_weight = nn.Parameter(torch.ones(config.head_dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Convolutions start as the identity."""
        with torch.no_grad():
            if self.norm_weight is not None:
                self.norm_weight.fill_(1.0)
            if self.conv_size:
                self.conv_weight.zero_()
                self.conv_weight[:, -1] = 1.0

    def _project(
        self, x: Tensor, state: State, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        """[..., D] and [...] to q, k [..., H, K], v [..., H, V] in float32, and the new state."""
        q, k, v, new_state = self._convolved(x, state)
        if self.rotary == "before":
            q, k = self._rotate(q, k, positions)
        return q, k, v, new_state

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, positions, self.rope_theta), rotate(k, positions, self.rope_theta)

    def _convolved(self, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor, State]:
        """[B, T, D], or [B, D] of a step, to q, k, v and the convolution's new state."""
        qkv, new_state = self.qkv(x), {}
        if self.conv_size and x.dim() == 2:
            qkv, new_state["conv"] = convolution_step(qkv, self.conv_weight, state["conv"])
            qkv = F.silu(qkv)
        elif self.conv_size:
            qkv, new_state["conv"] = convolved_silu(qkv, self.conv_weight, state["conv"])
        q, k, v = self._heads(qkv)
        if self.options.get("qk_norm"):
            q, k = (F.rms_norm(t, t.shape[-1:], eps=self.config.rms_norm_eps) for t in (q, k))
        return q, k, v, new_state

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.float().split(self.qkv.parts, dim=-1)
        return (
            q.unflatten(-1, (self.num_heads, -1)),
            k.unflatten(-1, (self.num_heads, -1)),
            v.unflatten(-1, (self.num_heads, -1)),
        )

    def _merge(self, o: Tensor, x: Tensor) -> Tensor:
        """The heads' outputs [..., H, V] and the layer's input [..., D] to [..., D]."""
        if self.gate is None:
            o = (o if self.norm_weight is None else self._norm(o)).to(x.dtype)
        else:
            gate = self.gate(x).unflatten(-1, o.shape[-2:])
            if self.norm_weight is None:
                o = o.to(gate.dtype) * F.silu(gate)
            else:
                o = self._gated_norm(o, gate)
        merged: Tensor = self.out(o.flatten(-2))
        return merged

    def _norm(self, o: Tensor) -> Tensor:
        assert self.norm_weight is not None
        weight = self.norm_weight.float()
        return F.rms_norm(o.float(), weight.shape, weight, self.config.rms_norm_eps)

    def _gated_norm(self, o: Tensor, gate: Tensor) -> Tensor:
        assert self.norm_weight is not None
        return gated_rms_norm(o, self.norm_weight, gate, self.config.rms_norm_eps)


def token_positions(position: Tensor, num_tokens: int) -> Tensor:
    """The positions [B, T] of T tokens after ``position`` [B] tokens."""
    return position.unsqueeze(1) + torch.arange(num_tokens, device=position.device)
