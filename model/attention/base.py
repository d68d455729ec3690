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
its `TensorSpec` says. **All zeros is the empty state**, for every tensor of
every mechanism; one that needs another start (a running maximum, say) encodes
it so that zero means "nothing yet". State is never stored below float32. Sums
that nothing decays are float64 and counters are integers, because a float32
sum stops taking in new tokens after 2**24 of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from model.config import ModelConfig

State = dict[str, Tensor]

#: Where a mechanism with a loss of its own (a commitment loss, say) appends it, a scalar.
Losses = list[Tensor] | None


@dataclass(frozen=True)
class TensorSpec:
    """Shape (without batch) and dtype of one tensor of a layer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Attention(nn.Module, ABC):
    """One layer of token mixing. Subclasses are listed in ``model.attention.MECHANISMS``."""

    #: False only for the baseline whose cache grows with the text.
    constant_state: ClassVar[bool] = True
    #: Names that ``config.attention_options`` may hold, with their defaults.
    options: ClassVar[dict[str, object]] = {}
    #: What an option may be: for numbers the smallest and the largest value, for names a choice.
    allowed: ClassVar[dict[str, tuple[object, ...]]] = {}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def check_options(cls, config: ModelConfig) -> None:
        """Raises `ConfigError` that names the option where one is unknown or out of range."""
        from model.config import ConfigError

        for name, value in config.attention_options.items():
            if name not in cls.options:
                raise ConfigError(
                    f"attention_options.{name} is unknown to {config.attention!r}"
                    f" (it has: {', '.join(sorted(cls.options)) or 'none'})"
                )
            if type(value) is int and isinstance(cls.options[name], float):
                value = float(value)
            if type(value) is not type(cls.options[name]):
                raise ConfigError(
                    f"attention_options.{name} must be"
                    f" {type(cls.options[name]).__name__}, not {value!r}"
                )
            if isinstance(value, str):
                if value not in cls.allowed[name]:
                    raise ConfigError(
                        f"attention_options.{name} must be"
                        f" {' or '.join(map(repr, cls.allowed[name]))}, not {value!r}"
                    )
            elif name in cls.allowed:
                low, high = cls.allowed[name]
                if not low <= value <= high:  # type: ignore[operator]
                    raise ConfigError(
                        f"attention_options.{name} must be in {low}..{high}, not {value!r}"
                    )

    @classmethod
    def option(cls, config: ModelConfig, name: str) -> Any:
        """The option as the config has it, else its default."""
        return config.attention_options.get(name, cls.options[name])

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Sets what should not start as `LanguageModel.init_weights` leaves it."""

    @classmethod
    @abstractmethod
    def state_spec(cls, config: ModelConfig) -> dict[str, TensorSpec]:
        """The tensors of one layer's state, known before any token is seen."""

    def empty_state(self, batch: int, device: torch.device) -> State:
        """Zeros of `state_spec`, each ``[batch, *shape]``."""
        return {
            name: torch.zeros(batch, *spec.shape, dtype=spec.dtype, device=device)
            for name, spec in self.state_spec(self.config).items()
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
