"""What is known of a mechanism without tensors: its options, its state and its weights' shapes.

A config is checked, a session's bytes are counted and a checkpoint's keys are
compared with these alone, so none of that imports torch. The mechanisms' own
are in `model.attention.specs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from model.files import ConfigError
from model.tensor_spec import Shape, TensorSpec

#: The options of a mechanism by name, defaults filled in.
Options = Mapping[str, Any]


class AttentionConfig(Protocol):
    """What a mechanism reads of a model's config."""

    @property
    def attention(self) -> str: ...
    @property
    def attention_options(self) -> Mapping[str, Any]: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


@dataclass(frozen=True)
class Option:
    """One option's default, and what it may be.

    ``allowed`` is for numbers the smallest and the largest value, for names
    the choice, and empty for booleans. ``refused`` has names that people will
    try, and why they are not built.
    """

    default: Any
    allowed: tuple[Any, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def check(self, name: str, value: Any) -> None:
        """Raises `ConfigError` where the option called ``name`` cannot be ``value``."""
        if type(value) is int and isinstance(self.default, float):
            value = float(value)
        if type(value) is not type(self.default):
            kind = type(self.default).__name__
            raise ConfigError(f"attention_options.{name} must be {kind}, not {value!r}")
        if isinstance(value, str):
            if value in self.refused:
                reason = self.refused[value]
                raise ConfigError(f"attention_options.{name} {value!r} is not built: {reason}")
            if value not in self.allowed:
                known = " or ".join(map(repr, self.allowed))
                raise ConfigError(f"attention_options.{name} must be {known}, not {value!r}")
        elif self.allowed and not self.allowed[0] <= value <= self.allowed[1]:
            low, high = self.allowed
            raise ConfigError(f"attention_options.{name} must be in {low}..{high}, not {value!r}")


def _no_buffers(options: Options) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Spec:
    """A mechanism as its config knows it.

    ``state`` and ``weights`` give one layer's tensors from the config and its
    options. ``buffers`` names those of ``weights`` that no gradient trains with
    the options that it is given, and ``rules`` are checks beyond one option's
    range: they raise `ConfigError`.
    ``constant_state`` is False only for the baseline whose cache grows.
    """

    state: Callable[[AttentionConfig, Options], dict[str, TensorSpec]]
    weights: Callable[[AttentionConfig, Options], dict[str, Shape]]
    options: Mapping[str, Option] = field(default_factory=dict)
    rules: tuple[Callable[[AttentionConfig, Options], None], ...] = ()
    buffers: Callable[[Options], tuple[str, ...]] = _no_buffers
    constant_state: bool = True

    def values(self, config: AttentionConfig) -> dict[str, Any]:
        """Every option of the mechanism: as the config has it, else its default."""
        defaults = {name: option.default for name, option in self.options.items()}
        return {**defaults, **config.attention_options}

    def check(self, config: AttentionConfig) -> None:
        """Raises `ConfigError` that names the option where one is unknown or out of range."""
        for name, value in config.attention_options.items():
            if name not in self.options:
                raise ConfigError(
                    f"attention_options.{name} is unknown to {config.attention!r}"
                    f" (it has: {', '.join(sorted(self.options)) or 'none'})"
                )
            self.options[name].check(name, value)
        if self.values(config).get("conv_size") == 1:
            raise ConfigError("attention_options.conv_size must be 0 or at least 2, not 1")
        for rule in self.rules:
            rule(config, self.values(config))

    def state_spec(self, config: AttentionConfig) -> dict[str, TensorSpec]:
        """The tensors of one layer's state, known before any token is seen.

        With a convolution over W tokens, conv [W - 1, H (2 K + V)] is one of them.
        """
        options = self.values(config)
        spec = self.state(config, options)
        if options.get("conv_size"):
            spec["conv"] = TensorSpec((options["conv_size"] - 1, qkv_rows(config, options)))
        return spec

    def weight_shapes(self, config: AttentionConfig) -> dict[str, Shape]:
        """The names and shapes of one layer's weights, as a checkpoint holds them."""
        return self.weights(config, self.values(config))

    def fixed_weights(self, config: AttentionConfig) -> tuple[str, ...]:
        """The names of those weights of one layer that no gradient trains."""
        return self.buffers(self.values(config))


def key_dim(config: AttentionConfig, options: Options) -> int:
    """K: option ``key_dim``, where there is one and it is not zero."""
    chosen: int = options.get("key_dim", 0)
    return chosen or config.head_dim


def num_features(config: AttentionConfig, options: Options) -> int:
    """F: option ``features``, where there is one and it is not zero."""
    chosen: int = options.get("features", 0)
    return chosen or config.head_dim


def qkv_rows(config: AttentionConfig, options: Options) -> int:
    """Rows of the one matrix that gives q, k and v."""
    return config.num_attention_heads * (2 * key_dim(config, options) + config.head_dim)
