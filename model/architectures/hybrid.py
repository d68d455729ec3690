"""Configs of families with attention in some layers, whose past is bounded."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeVar

from model.architectures.config import (
    Config,
    JsonConfig,
    check_booleans,
    check_epsilon,
    check_positive,
    check_token_ids,
    take_chosen,
)
from model.files import ConfigError
from model.tensor_spec import POSITION_BLOCK, DType, Shape, TensorSpec

# -------------------------------------------------------------------------------------------------
# The past of attention layers under a bound, which the operator states: ``context`` positions.
#
# Keys and values of a position have a place each. Where the text has come to the bound, ``past``
# decides: with "stop" it ends there. With "slide" the first `SINKS` positions stay and every
# further one takes the place of the oldest other, so that a text has no end (Xiao et al. 2023,
# "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453).


#: Positions at the beginning of a text that never lose their place.
SINKS = 4
#: Of keys and values.
PAST_DTYPE: DType = "float16"
#: What happens at the bound.
PASTS = ("stop", "slide")
#: The smallest bound: a block of which the sinks leave most.
MIN_CONTEXT = 2 * POSITION_BLOCK


class Bounded(Protocol):
    """The fields of a config whose state is bounded and not constant."""

    @property
    def max_context(self) -> int:
        """The longest text that the model was made for."""

    @property
    def context(self) -> int: ...
    @property
    def past(self) -> str: ...


C = TypeVar("C", bound=Config)


def with_past(config: C, context: int, past: str) -> C:
    """``config`` with another bound, rounded up to whole blocks; for a config that has one."""
    context = -(-context // POSITION_BLOCK) * POSITION_BLOCK
    return dataclasses.replace(config, context=context, past=past)  # type: ignore[type-var]


def longest_text(config: Config) -> int | None:
    """Tokens that a text may have; None where there is no bound."""
    return config.context if config.context and config.past == "stop" else None


def check_bound(config: Bounded) -> None:
    """Raises `ConfigError` where ``context`` or ``past`` is not a possible one."""
    context = config.context
    if type(context) is not int or context < MIN_CONTEXT or context % POSITION_BLOCK:
        raise ConfigError(
            f"context must be a multiple of {POSITION_BLOCK} and at least {MIN_CONTEXT},"
            f" not {context!r}"
        )
    if config.past not in PASTS:
        raise ConfigError(f"past must be {' or '.join(map(repr, PASTS))}, not {config.past!r}")


def default_context(max_context: int) -> int:
    """The bound of a model whose operator states none: the model's own, in whole blocks."""
    return max(MIN_CONTEXT, max_context // POSITION_BLOCK * POSITION_BLOCK)


def place_of(position: int, context: int) -> int:
    """The place of ``position``: its own, or beyond the bound that of the oldest other."""
    if position < context:
        return position
    return SINKS + (position - SINKS) % (context - SINKS)


def past_state(
    context: int, num_heads: int, head_dim: int, per_position: bool = True
) -> dict[str, TensorSpec]:
    """Keys [blocks, H, F, positions] and values [blocks, H, positions, F] of an attention layer.

    Keys are turned, so that the scores of all positions of a block are computed side by side.
    ``per_position``: whether a short text uses a part of it alone.
    """
    blocks, size = -(-context // POSITION_BLOCK), POSITION_BLOCK
    return {
        "k": TensorSpec((blocks, num_heads, head_dim, size), PAST_DTYPE, per_position),
        "v": TensorSpec((blocks, num_heads, size, head_dim), PAST_DTYPE, per_position),
    }


# -------------------------------------------------------------------------------------------------
# The names and shapes of the weights of `model.architectures.decoder`, known without torch.


def decoder_shapes(
    config: Config, mixers: Sequence[dict[str, Shape]], tied: bool, post_norms: bool = False
) -> dict[str, Shape]:
    """The weights of a decoder of ``config`` whose mixers have these weights, by their names.

    A block ends with an MLP where `mlp_size` is not 0. ``post_norms``: whether what mixers and MLPs
    give is normed.
    """
    width, size, inner = config.hidden_size, config.vocab_size, mlp_size(config)
    shapes: dict[str, Shape] = {"embedding.weight": (size, width), "norm.weight": (width,)}
    if not tied:
        shapes["head.weight"] = (size, width)
    for layer, mixer in enumerate(mixers):
        block: dict[str, Shape] = {"mixer_norm.weight": (width,)}
        block |= {f"mixer.{name}": shape for name, shape in mixer.items()}
        if inner:
            block |= {"mlp_norm.weight": (width,), "mlp.down.weight": (width, inner)}
            block |= {f"mlp.{name}.weight": (inner, width) for name in ("gate", "up")}
        if post_norms:
            block |= {"mixer_post_norm.weight": (width,), "mlp_post_norm.weight": (width,)}
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def mlp_size(config: Config) -> int:
    """The width inside the MLP that ends each block; 0 without one.

    That is a config's ``intermediate_size``, unless it has ``ends_with_mlp`` and that is false.
    """
    ends_with_mlp: bool = getattr(config, "ends_with_mlp", True)
    inner: int = getattr(config, "intermediate_size", 0)
    return inner if ends_with_mlp else 0


def attention_shapes(
    width: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    gated: bool = False,
    head_gates: bool = False,
    qk_norm: bool = True,
    qkv_bias: bool = False,
    out_bias: bool = False,
) -> dict[str, Shape]:
    """The weights of `model.architectures.decoder`, by their names in a mixer.

    With a gate each head has its rows after the query's; ``head_gates`` are one number a head.
    """
    rows = dict.fromkeys("qkv", num_kv_heads * head_dim)
    rows["q"] = num_heads * head_dim * (2 if gated else 1)
    shapes: dict[str, Shape] = {f"{name}.weight": (num, width) for name, num in rows.items()}
    shapes["out.weight"] = (width, num_heads * head_dim)
    if head_gates:
        shapes["gate.weight"] = (num_heads, width)
    if qkv_bias:
        shapes |= {f"{name}.bias": (num,) for name, num in rows.items()}
    if out_bias:
        shapes["out.bias"] = (width,)
    if qk_norm:
        shapes |= {"q_norm.weight": (head_dim,), "k_norm.weight": (head_dim,)}
    return shapes


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
    #: See `model.architectures.hybrid`; 0 becomes the default. Without attention it is 0.
    context: int
    past: str

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "head_dim")
        check_positive(self, "intermediate_size", "num_attention_heads", "num_key_value_heads")
        check_positive(self, "max_context")
        check_epsilon(self, "norm_eps")
        check_token_ids(self, "bos_token_id", "eos_token_id")
        check_booleans(self, "tied")
        self._check_theta("rope_theta")
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

    def _check_theta(self, name: str) -> None:
        theta = getattr(self, name)
        if type(theta) is not float or not 1.0 < theta < 1e30:
            raise ConfigError(f"{name} must be a float above 1, not {theta!r}")

    def _check_rotary(self, name: str) -> None:
        """For a field with channels of a head that turn, of which there may be none."""
        size = getattr(self, name)
        if type(size) is not int or size % 2 or not 0 <= size <= self.head_dim:
            raise ConfigError(f"{name} must be even and in 0..{self.head_dim}, not {size!r:.80}")

    @classmethod
    def for_training(cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]) -> Self:
        """See `Config`; the ``attention_options`` are `options`."""
        sizes, options = take_chosen(chosen, cls.attention, cls.options)
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

    #: Whether attention has a gate, and norms of queries and keys.
    gated: ClassVar[bool]
    qk_norm: ClassVar[bool] = True
    #: Of so many layers the last is attention, where nothing else is known.
    interval: ClassVar[int]

    #: Indices of the attention layers, in their order.
    attention_layers: tuple[int, ...]
    conv_size: int

    def __post_init__(self) -> None:
        check_positive(self, "num_hidden_layers")
        self._set_layers("attention_layers")
        super().__post_init__()
        if type(self.conv_size) is not int or not 2 <= self.conv_size <= 64:
            raise ConfigError(f"conv_size must be in 2..64, not {self.conv_size!r}")

    def _set_layers(self, name: str) -> None:
        """Checks a field of indices of layers, which a JSON file has as a list."""
        self._set(name, check_layers(name, getattr(self, name), self.num_hidden_layers))

    @classmethod
    def for_training(cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]) -> Self:
        """See `BoundedConfig`; of `interval` layers the last is attention, if none are named."""
        num_layers = chosen.get("num_hidden_layers", cls.num_hidden_layers)
        options = chosen.get("attention_options", {})
        if isinstance(options, dict):
            usual = list(range(cls.interval - 1, num_layers, cls.interval))
            options = {"attention_layers": usual, **options}
        return super().for_training(
            vocab_size, eos_token_id, {**chosen, "attention_options": options}
        )

    def layer_states(self) -> list[dict[str, TensorSpec]]:
        """See `model.architectures.config.Config`."""
        past, other = self.past_state(), self.other_state()
        return [
            (other if has_other else {}) | (past if is_attention else {})
            for is_attention, has_other in zip(self.is_attention, self.has_other, strict=True)
        ]

    def weight_shapes(self) -> dict[str, Shape]:
        """See `model.architectures.config.Config`."""
        mixers = list(map(self.mixer_shapes, self.is_attention, self.has_other))
        return decoder_shapes(self, mixers, self.tied)

    @property
    def has_other(self) -> list[bool]:
        """Whether each layer has the other mixer: where it is not attention, in most families."""
        return [not is_attention for is_attention in self.is_attention]

    def mixer_shapes(self, is_attention: bool, has_other: bool) -> dict[str, Shape]:
        """The weights of the mixer of such a layer, by their names in it; it is one of the two."""
        assert is_attention != has_other, (is_attention, has_other)
        return self.attention_shapes() if is_attention else self.other_shapes()

    def attention_shapes(self) -> dict[str, Shape]:
        """The weights of a layer's attention, by their names in it."""
        sizes = self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim
        return attention_shapes(*sizes, gated=self.gated, qk_norm=self.qk_norm)

    @abstractmethod
    def other_state(self) -> dict[str, TensorSpec]:
        """The state tensors of the other mixer, in one layer."""

    @abstractmethod
    def other_shapes(self) -> dict[str, Shape]:
        """The weights of the other mixer, by their names in it."""

    @property
    def is_attention(self) -> list[bool]:
        """Of each layer."""
        attention = set(self.attention_layers)
        return [layer in attention for layer in range(self.num_hidden_layers)]


def check_layers(name: str, values: Any, num_layers: int) -> tuple[int, ...]:
    """Indices of layers in the field ``name``, which a JSON file has as a list.

    Raises `ConfigError` where they are not in order, or not those of ``num_layers`` layers.
    """
    if not isinstance(values, (list, tuple)) or not all(type(layer) is int for layer in values):
        raise ConfigError(f"{name} must be a list of integers, not {values!r}")
    layers = tuple(values)
    if layers != tuple(sorted({layer for layer in layers if 0 <= layer < num_layers})):
        raise ConfigError(
            f"{name} must be in 0..{num_layers - 1} and in order, not {list(layers)!r}"
        )
    return layers
