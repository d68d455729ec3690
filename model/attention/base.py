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
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor, nn

from model.architectures.network import DTYPES, Losses, State
from model.attention import entry, spec_of
from model.attention.spec import AttentionConfig

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
