"""The network of an architecture: token ids to logits, in the three forms of the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures import ARCHITECTURES, load_class
from model.architectures.config import Config

#: The tensors of one layer's state, by name, each [B, *shape].
State = dict[str, Tensor]
#: One `State` per layer.
ModelState = tuple[State, ...]

#: The dtypes of a `TensorSpec`.
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
}

#: Where a layer with a loss of its own (a commitment loss, say) appends it, a scalar.
Losses = list[Tensor] | None


class Network(nn.Module, ABC):
    """Token ids to logits. For any split of a text the forms agree on logits and state.

    ``position`` is [B] int64: how many tokens the state has seen. Arguments are not changed.
    A constructor takes the config alone and leaves the weights uninitialised.
    """

    config: Config

    def parallel(self, tokens: Tensor, losses: Losses = None) -> Tensor:
        """[B, T] int64 to logits [B, T, vocabulary], from the empty state."""
        return self.logits(self.hidden_parallel(tokens, losses))

    def chunk(
        self, tokens: Tensor, state: ModelState, position: Tensor
    ) -> tuple[Tensor, ModelState]:
        """[B, T] int64 with the state of ``position`` [B] tokens; logits and the new state."""
        x, state = self.hidden_chunk(tokens, state, position)
        return self.logits(x), state

    def step(
        self, tokens: Tensor, state: ModelState, position: Tensor
    ) -> tuple[Tensor, ModelState]:
        """One token each, [B] int64; logits [B, vocabulary] and the new state."""
        x, state = self.hidden_step(tokens, state, position)
        return self.logits(x), state

    def hidden_parallel(self, tokens: Tensor, losses: Losses = None) -> Tensor:
        """`parallel` without the head: the normed output of the last block, [B, T, D]."""
        num, device = len(tokens), tokens.device
        position = torch.zeros(num, dtype=torch.int64, device=device)
        return self.hidden_chunk(tokens, self.exact_state(num, device), position, losses)[0]

    @abstractmethod
    def init_weights(self, generator: torch.Generator) -> None:
        """Sets every weight to what training starts from."""

    @abstractmethod
    def hidden_chunk(
        self, tokens: Tensor, state: ModelState, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, ModelState]:
        """`chunk` without the head."""

    @abstractmethod
    def hidden_step(
        self, tokens: Tensor, state: ModelState, position: Tensor
    ) -> tuple[Tensor, ModelState]:
        """`step` without the head: [B, D] and the new state."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """[vocabulary, D]; the embedding itself where the two are tied."""

    def logits(self, x: Tensor) -> Tensor:
        """[..., D] from `hidden_parallel` or `hidden_chunk` to [..., vocabulary]."""
        return F.linear(x, self.head_weight)

    def empty_state(self, batch: int, device: torch.device | None = None) -> ModelState:
        """The state before any token: all zeros."""
        device = device or self.head_weight.device
        return tuple(
            {
                name: torch.zeros(batch, *spec.shape, dtype=DTYPES[spec.dtype], device=device)
                for name, spec in layer.items()
            }
            for layer in self.config.layer_states()
        )

    def exact_state(self, batch: int, device: torch.device | None = None) -> ModelState:
        """`empty_state` with float32 where sessions round to 16 bits, for what is not served."""
        state = self.empty_state(batch, device)
        return tuple({name: _exact(tensor) for name, tensor in layer.items()} for layer in state)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def _exact(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def network_class(config: Config) -> type[Network]:
    """The network that ``config`` describes; it is constructed from the config alone."""
    cls: type[Network] = load_class(ARCHITECTURES[config.model_type].network)
    return cls


def model_of(
    config: Config, weights: Mapping[str, npt.NDArray[Any]], dtype: torch.dtype = torch.float32
) -> Network:
    """A model with these weights, which are copied, as ``dtype``, in evaluation mode and frozen."""
    model = network_class(config)(config)
    for name, tensor in model.state_dict().items():
        tensor.copy_(torch.from_numpy(np.array(weights[name])))
    return model.to(dtype).eval().requires_grad_(False)
