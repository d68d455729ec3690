"""The config of an ARWKV model, its state and its weights' names and shapes.

Symbols: D ``hidden_size``, H heads, N ``head_dim``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from model.architectures.config import JsonConfig, check_epsilon, check_positive, check_token_ids
from model.architectures.hybrid import decoder_shapes
from model.families.rwkv7.config import check_heads, chosen_sizes, suggested_ranks, time_mix_shapes
from model.files import ConfigError
from model.tensor_spec import Shape, TensorSpec

#: What of the time mix users may choose.
OPTIONS = ("decay_rank", "rate_rank", "value_rank", "gate_rank", "group_norm")


@dataclass(frozen=True)
class Arwkv7Config(JsonConfig):
    """Everything that decides the shapes of weights and state."""

    model_type: ClassVar[str] = "everstream-arwkv7"
    attention: ClassVar[str] = "arwkv7"
    constant_state: ClassVar[bool] = True

    vocab_size: int
    hidden_size: int = 896
    num_hidden_layers: int = 24
    head_dim: int = 64
    intermediate_size: int = 4864
    #: Ranks of the maps w, a, v and g. ``value_rank`` has no weights in layer 0.
    decay_rank: int = 64
    rate_rank: int = 64
    value_rank: int = 32
    #: 0: the output has no gate.
    gate_rank: int = 0
    #: Whether each head's output is normed, with ``group_norm_eps``.
    group_norm: bool = False
    norm_eps: float = 1e-6
    group_norm_eps: float = 64e-5
    #: Whether the embedding is the head too.
    tied: bool = False
    bos_token_id: int = 0
    eos_token_id: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "head_dim")
        check_positive(self, "intermediate_size", "decay_rank", "rate_rank", "value_rank")
        if self.gate_rank != 0:
            check_positive(self, "gate_rank")
        check_epsilon(self, "norm_eps", "group_norm_eps")
        for name in ("group_norm", "tied"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be a boolean, not {getattr(self, name)!r}")
        check_token_ids(self, "bos_token_id", "eos_token_id")
        if self.hidden_size % self.head_dim:
            raise ConfigError(f"head_dim must divide {self.hidden_size}, not {self.head_dim}")

    @classmethod
    def for_training(
        cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]
    ) -> Arwkv7Config:
        """See `model.architectures.config.Config`.

        ``intermediate_size`` is 8/3 D in whole 64s where it is not chosen, and the ranks are
        `suggested_ranks` where they are not among the ``attention_options``. There is a gate and a
        norm of each head where these ask for them.
        """
        sizes = chosen_sizes(chosen, cls.attention, OPTIONS)
        config = cls(vocab_size, **sizes, bos_token_id=eos_token_id, eos_token_id=eos_token_id)
        check_heads(config, chosen)
        inner = 64 * -(-config.hidden_size * 8 // (3 * 64))
        ranks = suggested_ranks(config.hidden_size) | {"gate_rank": 0}
        return dataclasses.replace(config, **({"intermediate_size": inner, **ranks} | sizes))

    @property
    def num_attention_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def attention_options(self) -> dict[str, int | bool]:
        return {name: getattr(self, name) for name in OPTIONS}

    def layer_states(self) -> Sequence[dict[str, TensorSpec]]:
        """S [H, N, N] as [key, value], and the last input of the token shift [D]."""
        heads, dim = self.num_attention_heads, self.head_dim
        layer = {
            "S": TensorSpec((heads, dim, dim), is_sum=True),
            "time_shift": TensorSpec((self.hidden_size,)),
        }
        return [layer] * self.num_hidden_layers

    def weight_shapes(self) -> dict[str, Shape]:
        """See `model.architectures.config.Config`."""
        mixers = [time_mix_shapes(self, layer) for layer in range(self.num_hidden_layers)]
        return decoder_shapes(self, mixers, self.tied)

    def fixed_weights(self) -> frozenset[str]:
        return frozenset()
