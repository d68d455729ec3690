"""Configs of families with attention in all or some of their layers, whose past is bounded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from model.architectures.bounded import check_bound, default_context, past_state
from model.architectures.config import (
    JsonConfig,
    check_epsilon,
    check_positive,
    check_token_ids,
)
from model.architectures.decoder_shapes import attention_shapes, decoder_shapes
from model.files import ConfigError
from model.tensor_spec import Shape, TensorSpec


class BoundedConfig(JsonConfig, ABC):
    """What families with attention over a bounded past have; a subclass is a frozen dataclass."""

    attention: ClassVar[str]
    #: Fields that a user chooses as ``attention_options``.
    options: ClassVar[tuple[str, ...]]

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    tied: bool
    bos_token_id: int
    eos_token_id: int
    #: The longest text that the model was made for.
    max_context: int
    #: See `model.architectures.bounded`; 0 becomes the default. Without attention it is 0.
    context: int
    past: str

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "head_dim")
        check_positive(self, "intermediate_size", "num_attention_heads", "num_key_value_heads")
        check_positive(self, "max_context")
        check_epsilon(self, "norm_eps")
        check_token_ids(self, "bos_token_id", "eos_token_id")
        if type(self.tied) is not bool:
            raise ConfigError(f"tied must be a boolean, not {self.tied!r}")
        if type(self.rope_theta) is not float or not 1.0 < self.rope_theta < 1e30:
            raise ConfigError(f"rope_theta must be a float above 1, not {self.rope_theta!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads must divide {self.num_attention_heads},"
                f" not {self.num_key_value_heads}"
            )
        if not any(self.is_attention):
            self._set("context", 0)
            return
        if not self.context and type(self.context) is int:
            self._set("context", default_context(self.max_context))
        check_bound(self)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the class is frozen

    @classmethod
    def for_training(cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]) -> Self:
        """See `Config`; the ``attention_options`` are `options`."""
        sizes = dict(chosen)
        attention, options = sizes.pop("attention", None), sizes.pop("attention_options", {})
        if attention not in (None, cls.attention):
            raise ConfigError(f"attention must be {cls.attention!r}, not {attention!r}")
        if not isinstance(options, dict) or options.keys() - set(cls.options):
            names = ", ".join(cls.options)
            raise ConfigError(f"attention_options must be an object of {names}, not {options!r}")
        ends = {"bos_token_id": eos_token_id, "eos_token_id": eos_token_id}
        values = {"model_type": cls.model_type, "vocab_size": vocab_size, **sizes, **ends}
        return cls.from_dict({**values, **options})

    @property
    def constant_state(self) -> bool:
        """See `model.architectures.config.Config`."""
        return not any(self.is_attention)

    @property
    def attention_options(self) -> dict[str, Any]:
        """See `model.architectures.config.Config`."""
        values = {name: getattr(self, name) for name in self.options}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    def fixed_weights(self) -> frozenset[str]:
        """See `model.architectures.config.Config`."""
        return frozenset()

    def past_state(self) -> dict[str, TensorSpec]:
        """The state tensors of a layer of attention."""
        return past_state(self.context, self.num_key_value_heads, self.head_dim)

    @property
    @abstractmethod
    def is_attention(self) -> list[bool]:
        """Of each layer."""

    @abstractmethod
    def layer_states(self) -> list[dict[str, TensorSpec]]:
        """See `model.architectures.config.Config`."""

    @abstractmethod
    def weight_shapes(self) -> dict[str, Shape]:
        """See `model.architectures.config.Config`."""


class HybridConfig(BoundedConfig):
    """The layers of ``attention_layers`` are attention, the others have a state of constant size.

    A subclass says what the other layers have.
    """

    #: Whether attention has a gate.
    gated: ClassVar[bool]
    #: Of so many layers the last is attention, where nothing else is known.
    interval: ClassVar[int]

    #: Indices of the attention layers, in their order.
    attention_layers: tuple[int, ...]
    conv_size: int

    def __post_init__(self) -> None:
        check_positive(self, "num_hidden_layers")
        self._set("attention_layers", _layers(self.attention_layers, self.num_hidden_layers))
        super().__post_init__()
        if type(self.conv_size) is not int or not 2 <= self.conv_size <= 64:
            raise ConfigError(f"conv_size must be in 2..64, not {self.conv_size!r}")

    @classmethod
    def for_training(cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]) -> Self:
        """See `BoundedConfig`; of `interval` layers the last is attention, if none are named."""
        config = super().for_training(vocab_size, eos_token_id, chosen)
        if "attention_layers" in chosen.get("attention_options", {}):
            return config
        usual = range(cls.interval - 1, config.num_hidden_layers, cls.interval)
        return replace(config, attention_layers=tuple(usual))  # type: ignore[type-var]

    def layer_states(self) -> list[dict[str, TensorSpec]]:
        """See `model.architectures.config.Config`."""
        past, other = self.past_state(), self.other_state()
        return [past if is_attention else other for is_attention in self.is_attention]

    def weight_shapes(self) -> dict[str, Shape]:
        """See `model.architectures.config.Config`."""
        sizes = self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim
        attention, other = attention_shapes(*sizes, gated=self.gated), self.other_shapes()
        mixers = [attention if is_attention else other for is_attention in self.is_attention]
        return decoder_shapes(self, mixers, self.tied)

    @abstractmethod
    def other_state(self) -> dict[str, TensorSpec]:
        """The state tensors of a layer that is not attention."""

    @abstractmethod
    def other_shapes(self) -> dict[str, Shape]:
        """The weights of its mixer, by their names in it."""

    @property
    def is_attention(self) -> list[bool]:
        """Of each layer."""
        attention = set(self.attention_layers)
        return [layer in attention for layer in range(self.num_hidden_layers)]


def _layers(values: Any, num_layers: int) -> tuple[int, ...]:
    """Indices of layers, which a JSON file has as a list."""
    if not isinstance(values, (list, tuple)) or not all(type(layer) is int for layer in values):
        raise ConfigError(f"attention_layers must be a list of integers, not {values!r}")
    layers = tuple(values)
    if layers != tuple(sorted({layer for layer in layers if 0 <= layer < num_layers})):
        raise ConfigError(
            f"attention_layers must be in 0..{num_layers - 1} and in order, not {list(layers)!r}"
        )
    return layers
