"""The config of a Mamba-1 model, its state and its weights' names and shapes.

Symbols: D ``hidden_size``, d ``inner_size``, N ``state_size``, R ``dt_rank``, W ``conv_size``.
Falcon-Mamba (arXiv 2410.05355) norms dt, B and C, without weights: ``mixer_norm``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from model.architectures.config import (
    JsonConfig,
    check_epsilon,
    check_positive,
    check_token_ids,
)
from model.architectures.decoder_shapes import decoder_shapes
from model.files import ConfigError
from model.tensor_spec import Shape, TensorSpec

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
        for name in ("tied", "mixer_norm"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be a boolean, not {getattr(self, name)!r}")
        check_token_ids(self, "bos_token_id", "eos_token_id")

    @classmethod
    def for_training(
        cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]
    ) -> MambaConfig:
        """See `model.architectures.config.Config`. There are no heads: ``head_dim`` is ignored.

        d is `EXPAND` D and R is D / 16, rounded up, where the ``attention_options``, which are
        `OPTIONS`, do not have them.
        """
        sizes = {name: value for name, value in chosen.items() if name != "head_dim"}
        attention, options = sizes.pop("attention", None), sizes.pop("attention_options", {})
        if attention not in (None, cls.attention):
            raise ConfigError(f"attention must be {cls.attention!r}, not {attention!r}")
        if not isinstance(options, dict) or options.keys() - set(OPTIONS):
            names = ", ".join(OPTIONS)
            raise ConfigError(f"attention_options must be an object of {names}, not {options!r}")
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
        """The inputs before the convolution, oldest first [W - 1, d], and S [N, d]."""
        inner = self.inner_size
        layer = {
            "conv": TensorSpec((self.conv_size - 1, inner)),
            "S": TensorSpec((self.state_size, inner)),
        }
        return [layer] * self.num_hidden_layers

    def weight_shapes(self) -> dict[str, Shape]:
        """Rows of ``in`` are x and z, those of ``x`` dt, B and C."""
        inner, state = self.inner_size, self.state_size
        mixer: dict[str, Shape] = {
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
        return decoder_shapes(self, [mixer] * self.num_hidden_layers, self.tied)

    def fixed_weights(self) -> frozenset[str]:
        return frozenset()
