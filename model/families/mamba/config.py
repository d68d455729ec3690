"""The configs of Mamba-1 and Mamba-2 models, their states and their weights' names and shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from model.architectures.config import (
    JsonConfig,
    check_booleans,
    check_epsilon,
    check_positive,
    check_token_ids,
    take_chosen,
)
from model.architectures.hybrid import decoder_shapes
from model.files import ConfigError
from model.tensor_spec import Shape, TensorSpec

# Symbols: D ``hidden_size``, d ``inner_size``, N ``state_size``, R ``dt_rank``, W ``conv_size``.
# Falcon-Mamba (arXiv 2410.05355) norms dt, B and C, without weights: ``mixer_norm``.


#: Inner channels of a new model for each channel of the residual stream.
EXPAND = 2
#: Fields that a user chooses as ``attention_options``.
OPTIONS = ("inner_size", "state_size", "conv_size", "dt_rank")


@dataclass(frozen=True)
class MambaConfig(JsonConfig):
    """Everything that decides the shapes of weights and state. There is no MLP."""

    model_type: ClassVar[str] = "everstream-mamba"
    attention: ClassVar[str] = "mamba"
    constant_state: ClassVar[bool] = True

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 24
    #: Channels of the mixer.
    inner_size: int = 1536
    #: Numbers of state for each inner channel.
    state_size: int = 16
    conv_size: int = 4
    #: Rank of the map to the step sizes.
    dt_rank: int = 48
    norm_eps: float = 1e-5
    #: Whether dt, B and C are normed, with ``mixer_norm_eps``.
    mixer_norm: bool = False
    mixer_norm_eps: float = 1e-6
    #: Whether the head is the embedding.
    tied: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", *OPTIONS)
        check_epsilon(self, "norm_eps", "mixer_norm_eps")
        if self.conv_size < 2:
            raise ConfigError(f"conv_size must be at least 2, not {self.conv_size}")
        check_booleans(self, "tied", "mixer_norm")
        check_token_ids(self, "bos_token_id", "eos_token_id")

    @classmethod
    def for_training(
        cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]
    ) -> MambaConfig:
        """See `model.architectures.config.Config`. There are no heads: ``head_dim`` is ignored.

        d is `EXPAND` D and R is D / 16, rounded up, where the ``attention_options``, which are
        `OPTIONS`, do not have them.
        """
        sizes, options = take_chosen(chosen, cls.attention, OPTIONS)
        sizes.pop("head_dim", None)
        for name in ("intermediate_size", "num_attention_heads"):
            if name in sizes:
                raise ConfigError(f"{name} is not supported: a Mamba has no MLP and no heads")
        width = cls(vocab_size, **sizes).hidden_size
        derived = {"inner_size": EXPAND * width, "dt_rank": math.ceil(width / 16)}
        ends = {"bos_token_id": eos_token_id, "eos_token_id": eos_token_id}
        return cls(vocab_size, **sizes, **{**derived, **options, **ends})

    @property
    def num_attention_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        return self.inner_size

    @property
    def attention_options(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in OPTIONS}

    def layer_states(self) -> Sequence[dict[str, TensorSpec]]:
        """See `mixer_state`."""
        return [self.mixer_state()] * self.num_hidden_layers

    def mixer_state(self) -> dict[str, TensorSpec]:
        """The inputs before the convolution, oldest first [W - 1, d], and S [N, d]."""
        inner = self.inner_size
        return {
            "conv": TensorSpec((self.conv_size - 1, inner)),
            "S": TensorSpec((self.state_size, inner), is_sum=True),
        }

    def weight_shapes(self) -> dict[str, Shape]:
        """See `model.architectures.config.Config`."""
        return decoder_shapes(self, [self.mixer_shapes()] * self.num_hidden_layers, self.tied)

    def mixer_shapes(self, norm_weights: bool = False) -> dict[str, Shape]:
        """The weights of a layer's mixer. Rows of ``in`` are x and z, those of ``x`` dt, B and C.

        ``norm_weights``: whether the norms of dt, B and C have weights, as in hybrids.
        """
        inner, state = self.inner_size, self.state_size
        shapes: dict[str, Shape] = {
            "in.weight": (2 * inner, self.hidden_size),
            "conv": (inner, self.conv_size),
            "conv_bias": (inner,),
            "x.weight": (self.dt_rank + 2 * state, inner),
            "dt.weight": (inner, self.dt_rank),
            "dt.bias": (inner,),
            "A_log": (inner, state),
            "D": (inner,),
            "out.weight": (self.hidden_size, inner),
        }
        if norm_weights:
            sizes = {"dt": self.dt_rank, "b": state, "c": state}
            shapes |= {f"{part}_norm.weight": (size,) for part, size in sizes.items()}
        return shapes

    def fixed_weights(self) -> frozenset[str]:
        return frozenset()


# -------------------------------------------------------------------------------------------------
# Symbols: D ``hidden_size``, H heads, P ``head_dim``, N ``state_size``, G groups, W ``conv_size``.


#: Fields that a user chooses as ``attention_options``.
MAMBA2_OPTIONS = ("state_size", "num_groups", "conv_size")


@dataclass(frozen=True)
class Mamba2Config(JsonConfig):
    """Everything that decides the shapes of weights and state. There is no MLP."""

    model_type: ClassVar[str] = "everstream-mamba2"
    added_later: ClassVar[tuple[str, ...]] = ("mixer_norm",)
    attention: ClassVar[str] = "mamba2"
    constant_state: ClassVar[bool] = True

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 24
    num_attention_heads: int = 24
    head_dim: int = 64
    #: Numbers of state for each inner channel.
    state_size: int = 128
    #: Groups of heads that share B and C, and of channels that are normed together.
    num_groups: int = 1
    conv_size: int = 4
    #: Whether the gated channels are normed.
    mixer_norm: bool = True
    norm_eps: float = 1e-5
    #: Whether the head is the embedding.
    tied: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "head_dim")
        check_positive(self, "num_attention_heads", *MAMBA2_OPTIONS)
        check_epsilon(self, "norm_eps")
        if self.conv_size < 2:
            raise ConfigError(f"conv_size must be at least 2, not {self.conv_size}")
        check_booleans(self, "tied", "mixer_norm")
        check_token_ids(self, "bos_token_id", "eos_token_id")
        if self.num_attention_heads % self.num_groups:
            raise ConfigError(
                f"num_groups must divide {self.num_attention_heads} heads, not {self.num_groups}"
            )

    @classmethod
    def for_training(
        cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]
    ) -> Mamba2Config:
        """See `model.architectures.config.Config`.

        The number of heads is `EXPAND` D / P where it is not chosen; the ``attention_options`` are
        `MAMBA2_OPTIONS`.
        """
        sizes, options = take_chosen(chosen, cls.attention, MAMBA2_OPTIONS)
        if "intermediate_size" in sizes:
            raise ConfigError("intermediate_size is not supported: a Mamba-2 has no MLP")
        config = cls(vocab_size, **sizes, bos_token_id=eos_token_id, eos_token_id=eos_token_id)
        if "num_attention_heads" not in sizes:
            inner = EXPAND * config.hidden_size
            if inner % config.head_dim:
                raise ConfigError(f"head_dim must divide {EXPAND} * hidden_size = {inner}")
            options = {"num_attention_heads": inner // config.head_dim, **options}
        return dataclasses.replace(config, **options)

    @property
    def attention_options(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in MAMBA2_OPTIONS}

    @property
    def inner_size(self) -> int:
        """Channels of the mixer."""
        return self.num_attention_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """What passes the convolution: x, and B and C of each group."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    def layer_states(self) -> Sequence[dict[str, TensorSpec]]:
        """See `mixer_state`."""
        return [self.mixer_state()] * self.num_hidden_layers

    def mixer_state(self) -> dict[str, TensorSpec]:
        """The inputs before the convolution, oldest first [W - 1, channels], and S [H, N, P]."""
        heads, dim = self.num_attention_heads, self.head_dim
        return {
            "conv": TensorSpec((self.conv_size - 1, self.conv_channels)),
            "S": TensorSpec((heads, self.state_size, dim), is_sum=True),
        }

    def weight_shapes(self) -> dict[str, Shape]:
        """See `model.architectures.config.Config`."""
        return decoder_shapes(self, [self.mixer_shapes()] * self.num_hidden_layers, self.tied)

    def mixer_shapes(self) -> dict[str, Shape]:
        """The weights of a layer's mixer. The rows of ``in`` are z, x, B, C and dt."""
        heads, inner, channels = self.num_attention_heads, self.inner_size, self.conv_channels
        shapes: dict[str, Shape] = {
            "in.weight": (inner + channels + heads, self.hidden_size),
            "conv": (channels, self.conv_size),
            "conv_bias": (channels,),
            "dt_bias": (heads,),
            "A_log": (heads,),
            "D": (heads,),
            "norm.weight": (inner,),
            "out.weight": (self.hidden_size, inner),
        }
        if not self.mixer_norm:
            del shapes["norm.weight"]
        return shapes

    def fixed_weights(self) -> frozenset[str]:
        return frozenset()
