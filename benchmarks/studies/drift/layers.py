"""The layers that the measure of drift asks: a mechanism of our own block, or RWKV-7's time mix."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from model.architectures.network import DTYPES
from model.attention import MECHANISMS
from model.attention.base import Attention, State
from model.config import ModelConfig
from model.families.rwkv7 import network as rwkv7_network
from model.families.rwkv7.config import Rwkv7Config
from model.families.rwkv7.network import Recurrence, Rwkv7, TimeMix
from model.lm import LanguageModel

HEAD_DIM = 64
NAMES = (*MECHANISMS, "rwkv7")


class Layer(Protocol):
    """One layer of token mixing of width `HEAD_DIM`; see `model.attention.base`."""

    def chunk(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]: ...
    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]: ...
    def empty_state(self, batch: int, device: torch.device) -> State: ...
    def double(self) -> Layer: ...


class Rwkv7Layer(nn.Module):
    """The time mix of a first layer, with the shift of its input."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        sizes = {"hidden_size": HEAD_DIM, "num_hidden_layers": 1, "head_dim": HEAD_DIM}
        self._config = Rwkv7Config.for_training(1, 0, sizes)
        network = Rwkv7(self._config)
        network.init_weights(generator)
        mix = network.get_submodule("blocks.0.time_mix")
        assert isinstance(mix, TimeMix)
        self.mix = mix

    def chunk(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        """[B, T, D]."""
        before = torch.cat([state["time_shift"].to(x.dtype).unsqueeze(1), x[:, :-1]], dim=1)
        return self._mixed(x, before, state, rwkv7_network.chunk, x[:, -1])

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        """[B, D]."""
        return self._mixed(x, state["time_shift"].to(x.dtype), state, rwkv7_network.step, x)

    def empty_state(self, batch: int, device: torch.device) -> State:
        """Zeros."""
        (layer,) = self._config.layer_states()
        return {
            name: torch.zeros(batch, *spec.shape, dtype=DTYPES[spec.dtype], device=device)
            for name, spec in layer.items()
            if name != "channel_shift"
        }

    def _mixed(
        self, x: Tensor, before: Tensor, state: State, run: Recurrence, last: Tensor
    ) -> tuple[Tensor, State]:
        y, s, _ = self.mix(x, before, None, state["S"], run)
        return y, {"S": s, "time_shift": last.float()}


def attention_layer(
    name: str, hidden_size: int, num_heads: int, generator: torch.Generator
) -> Attention:
    """One layer of our own block, with the weights that training starts from."""
    config = ModelConfig(
        vocab_size=1,
        hidden_size=hidden_size,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=1,
        attention=name,
    )
    model = LanguageModel(config)
    model.init_weights(generator)
    layer = model.get_submodule("blocks.0.attention")
    assert isinstance(layer, Attention)
    return layer


def make_layer(name: str, generator: torch.Generator) -> Attention | Rwkv7Layer:
    """A layer of one head as training starts from it, but for matrices that are zero there."""
    layer: Attention | Rwkv7Layer
    if name == "rwkv7":
        layer = Rwkv7Layer(generator)
    else:
        layer = attention_layer(name, HEAD_DIM, 1, generator)
    layer.eval().requires_grad_(False)
    for module in layer.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            deviation = 1 / math.sqrt(module.in_features)
            module.weight.normal_(0.0, deviation, generator=generator)
    return layer


def constant_state(layer: Layer) -> bool:
    """False for one whose state grows with the text."""
    return not isinstance(layer, Attention) or layer.spec.constant_state


def sums(layer: Layer) -> list[str]:
    """The tensors of its state that grow with the tokens: undecayed sums, and counts."""
    if not isinstance(layer, Attention):
        return []
    spec = layer.spec.state_spec(layer.config)
    return [name for name in spec if spec[name].dtype == "float64" or name == "count"]
