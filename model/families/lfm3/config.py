"""The config of an LFM3 model, its state and its weights' names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from model.architectures.config import check_booleans, check_positive
from model.architectures.hybrid import (
    attention_shapes,
    check_layers,
    decoder_shapes,
    past_state,
)
from model.families.lfm2.config import Lfm2Config
from model.files import ConfigError
from model.tensor_spec import Shape, TensorSpec


@dataclass(frozen=True)
class Lfm3Config(Lfm2Config):
    """Everything that decides the shapes of weights and state.

    ``attention_layers`` see all of a bounded past, ``window_layers`` the last ``window`` tokens,
    and the others are convolutions.
    """

    model_type: ClassVar[str] = "everstream-lfm3"
    attention: ClassVar[str] = "lfm3"
    options: ClassVar[tuple[str, ...]] = (
        *("attention_layers", "window_layers", "window", "num_key_value_heads", "conv_size"),
        *("rotary_dim", "window_rotary_dim", "window_rope_theta", "head_gates", "post_norms"),
    )

    hidden_size: int = 2048
    num_hidden_layers: int = 24
    intermediate_size: int = 7680
    num_key_value_heads: int = 4
    head_dim: int = 128
    conv_size: int = 7
    #: Channels of a head that turn: of as many pairs of halves, so that channel i turns with
    #: ``i + head_dim / 2``, by ``rope_theta ** (-2 i / head_dim)`` a position.
    rotary_dim: int = 64
    #: Indices of the layers with a window, in their order.
    window_layers: tuple[int, ...] = ()
    #: Tokens that such a layer sees, its own among them.
    window: int = 256
    window_rope_theta: float = 1e4
    window_rotary_dim: int = 128
    #: Whether a sigmoid of the layer's input is multiplied with the output of each head.
    head_gates: bool = True
    #: Whether what mixers and MLPs give has a norm before it is added.
    post_norms: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "window")
        layers = check_layers("window_layers", self.window_layers, self.num_hidden_layers)
        self._set("window_layers", layers)
        if both := set(layers) & set(self.attention_layers):
            raise ConfigError(f"window_layers must not be attention_layers, as {min(both)} is")
        check_booleans(self, "head_gates", "post_norms")
        self._check_theta("window_rope_theta")
        self._check_rotary("rotary_dim")
        self._check_rotary("window_rotary_dim")

    @classmethod
    def for_training(cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]) -> Self:
        """See `BoundedConfig`; what is not chosen is in the published models' proportions.

        Of every four layers the third is attention, and the first has a window, but for layer 0.
        """
        num_layers = chosen.get("num_hidden_layers", cls.num_hidden_layers)
        head_dim = chosen.get("head_dim", cls.head_dim)
        options = chosen.get("attention_options", {})
        if isinstance(options, dict):
            attention = options.get("attention_layers", list(range(2, num_layers, 4)))
            windows = range(4, num_layers, 4)
            usual = {
                "attention_layers": attention,
                "window_layers": [layer for layer in windows if layer not in attention],
                "rotary_dim": head_dim // 4 * 2,
                "window_rotary_dim": head_dim,
            }
            chosen = {**chosen, "attention_options": {**usual, **options}}
        return super().for_training(vocab_size, eos_token_id, chosen)

    def rope_factors(self, rotary_dim: int) -> tuple[float, ...]:
        """What the frequencies of the pairs [head_dim / 2] are divided by, see `BoundedAttention`.

        ``rotary_dim`` channels turn: the others' frequencies are divided by infinity.
        """
        turning = rotary_dim // 2
        return (1.0,) * turning + (float("inf"),) * (self.head_dim // 2 - turning)

    def layer_states(self) -> list[dict[str, TensorSpec]]:
        """See `model.architectures.config.Config`."""
        states = super().layer_states()
        for layer in self.window_layers:
            sizes = self.window, self.num_key_value_heads, self.head_dim
            states[layer] = past_state(*sizes, per_position=False)
        return states

    def weight_shapes(self) -> dict[str, Shape]:
        """See `model.architectures.config.Config`."""
        sizes = self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim
        attention = attention_shapes(*sizes, head_gates=self.head_gates)
        attend, other = {*self.attention_layers, *self.window_layers}, self.other_shapes()
        mixers = [attention if i in attend else other for i in range(self.num_hidden_layers)]
        return decoder_shapes(self, mixers, self.tied, self.post_norms)
