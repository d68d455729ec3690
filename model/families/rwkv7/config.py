"""The configs of RWKV-7 and ARWKV models, their states and their weights' names and shapes.

Symbols: D ``hidden_size``, F ``intermediate_size``, H heads, N ``head_dim``, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

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

#: The low-rank maps of the time mix by module name; those with a bias, and the rank's field.
LOW_RANKS = {
    "decay": (True, "decay_rank"),
    "rate": (True, "rate_rank"),
    "value_mix": (True, "value_rank"),
    "gate": (False, "gate_rank"),
}


#: Rank of each low-rank map over the square root of the width: what the published trainer
#: suggests (RWKV-LM, RWKV-v7/train_temp/src/model.py), rounded to a multiple of 32.
RANK_FACTORS = {"decay_rank": 2.5, "rate_rank": 2.5, "value_rank": 1.7, "gate_rank": 5.0}


class TimeMixConfig(Protocol):
    """What decides the weights of a time mix: see `model.families.rwkv7.network`."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def decay_rank(self) -> int: ...
    @property
    def rate_rank(self) -> int: ...
    @property
    def value_rank(self) -> int: ...
    @property
    def gate_rank(self) -> int:
        """0: there is no gate."""

    @property
    def group_norm(self) -> bool:
        """Whether each head's output is normed."""

    @property
    def group_norm_eps(self) -> float: ...


@dataclass(frozen=True)
class Rwkv7Config(JsonConfig):
    """Everything that decides the shapes of weights and state."""

    model_type: ClassVar[str] = "everstream-rwkv7"
    attention: ClassVar[str] = "rwkv7"
    constant_state: ClassVar[bool] = True
    group_norm: ClassVar[bool] = True
    added_later: ClassVar[tuple[str, ...]] = ("embedding_norm",)

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 12
    head_dim: int = 64
    intermediate_size: int = 3072
    #: Ranks of the maps w, a, v and g. ``value_rank`` has no weights in layer 0.
    decay_rank: int = 64
    rate_rank: int = 64
    value_rank: int = 32
    gate_rank: int = 128
    norm_eps: float = 1e-5
    group_norm_eps: float = 64e-5
    bos_token_id: int = 0
    eos_token_id: int = 0
    #: Whether the embedding is normed; in some files its rows are already.
    embedding_norm: bool = True

    def __post_init__(self) -> None:
        _check_sizes(self, "gate_rank")
        check_booleans(self, "embedding_norm")

    @classmethod
    def for_training(
        cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]
    ) -> Rwkv7Config:
        """See `model.architectures.config.Config`.

        ``intermediate_size`` is 4 D where it is not chosen, and the ranks are `suggested_ranks`
        where they are not among the ``attention_options``.
        """
        sizes = chosen_sizes(chosen, cls.attention, tuple(RANK_FACTORS))
        config = cls(vocab_size, **sizes, bos_token_id=eos_token_id, eos_token_id=eos_token_id)
        check_heads(config, chosen)
        width = config.hidden_size
        follow = {"intermediate_size": 4 * width, **suggested_ranks(width)}
        return dataclasses.replace(config, **(follow | sizes))

    @property
    def num_attention_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def attention_options(self) -> dict[str, int]:
        return {rank: getattr(self, rank) for _, rank in LOW_RANKS.values()}

    def layer_states(self) -> Sequence[dict[str, TensorSpec]]:
        """S [H, N, N] as [key, value], and the last input of either token shift [D]."""
        heads, dim, shift = self.num_attention_heads, self.head_dim, TensorSpec((self.hidden_size,))
        sums = TensorSpec((heads, dim, dim), is_sum=True)
        layer = {"S": sums, "time_shift": shift, "channel_shift": shift}
        return [layer] * self.num_hidden_layers

    def weight_shapes(self) -> dict[str, Shape]:
        """See `model.architectures.config.Config`."""
        width = self.hidden_size
        shapes: dict[str, Shape] = {"embedding.weight": (self.vocab_size, width)}
        shapes |= {"head.weight": (self.vocab_size, width)}
        if self.embedding_norm:
            shapes |= _affine("embedding_norm", width)
        shapes |= _affine("norm", width)
        for layer in range(self.num_hidden_layers):
            block = self._block_shapes(layer)
            shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
        return shapes

    def fixed_weights(self) -> frozenset[str]:
        return frozenset()

    def _block_shapes(self, layer: int) -> dict[str, Shape]:
        """In the order in which training draws what it starts from."""
        width, inner = self.hidden_size, self.intermediate_size
        mix = {f"time_mix.{n}": shape for n, shape in time_mix_shapes(self, layer).items()}
        shapes = {name: mix[name] for name in mix if not name.endswith((".weight", ".bias"))}
        shapes |= {
            "channel_mix.shift_mix": (width,),
            "channel_mix.key.weight": (inner, width),
            "channel_mix.value.weight": (width, inner),
        }
        return shapes | mix | _affine("time_norm", width) | _affine("channel_norm", width)


def time_mix_shapes(config: TimeMixConfig, layer: int) -> dict[str, Shape]:
    """The weights of a layer's time mix."""
    width = config.hidden_size
    shapes: dict[str, Shape] = {
        "shift_mix": (6 if config.gate_rank else 5, width),
        "k_k": (width,),
        "k_a": (width,),
        "r_k": (config.num_attention_heads, config.head_dim),
    }
    for name in ("receptance", "key", "value", "output"):
        shapes[f"{name}.weight"] = (width, width)
    for name, (has_bias, field) in LOW_RANKS.items():
        rank = getattr(config, field)
        if rank == 0 or (name == "value_mix" and layer == 0):
            continue
        shapes[f"{name}.down.weight"] = (rank, width)
        shapes[f"{name}.up.weight"] = (width, rank)
        if has_bias:
            shapes[f"{name}.up.bias"] = (width,)
    return shapes | (_affine("group_norm", width) if config.group_norm else {})


def chosen_sizes(
    chosen: Mapping[str, Any], attention: str, options: Sequence[str]
) -> dict[str, Any]:
    """Fields of a config from what a user chose: sizes, and of the attention these ``options``.

    Raises `ConfigError`. Heads follow from the other sizes: see `check_heads`.
    """
    sizes, values = take_chosen(chosen, attention, options)
    sizes.pop("num_attention_heads", None)
    return sizes | values


def _check_sizes(config: Rwkv7Config | Arwkv7Config, *ranks: str) -> None:
    """What both configs check, with more ``ranks``. Raises `ConfigError`."""
    check_positive(config, "vocab_size", "hidden_size", "num_hidden_layers", "head_dim")
    check_positive(config, "intermediate_size", "decay_rank", "rate_rank", "value_rank", *ranks)
    check_epsilon(config, "norm_eps", "group_norm_eps")
    check_token_ids(config, "bos_token_id", "eos_token_id")
    if config.hidden_size % config.head_dim:
        raise ConfigError(f"head_dim must divide {config.hidden_size}, not {config.head_dim}")


def check_heads(config: TimeMixConfig, chosen: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where a user chose another number of heads than ``config`` has."""
    heads, found = chosen.get("num_attention_heads"), config.num_attention_heads
    if heads not in (None, found):
        raise ConfigError(f"num_attention_heads is hidden_size / head_dim = {found}, not {heads}")


def suggested_ranks(width: int) -> dict[str, int]:
    """The ranks for a model of ``width``, by `RANK_FACTORS`; at least 32.

    Those of the published models are these, or near them.
    """
    units = {name: factor * math.sqrt(width) / 32 for name, factor in RANK_FACTORS.items()}
    return {name: 32 * max(1, round(unit)) for name, unit in units.items()}


def _affine(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


#: What of the time mix of ARWKV users may choose.
ARWKV7_OPTIONS = ("decay_rank", "rate_rank", "value_rank", "gate_rank", "group_norm")


@dataclass(frozen=True)
class Arwkv7Config(JsonConfig):
    """ARWKV: the time mix in the body of Qwen2.5. Everything that decides the shapes."""

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
        _check_sizes(self, *(["gate_rank"] if self.gate_rank != 0 else []))
        check_booleans(self, "group_norm", "tied")

    @classmethod
    def for_training(
        cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]
    ) -> Arwkv7Config:
        """See `model.architectures.config.Config`.

        ``intermediate_size`` is 8/3 D in whole 64s where it is not chosen, and the ranks are
        `suggested_ranks` where they are not among the ``attention_options``. There is a gate and a
        norm of each head where these ask for them.
        """
        sizes = chosen_sizes(chosen, cls.attention, ARWKV7_OPTIONS)
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
        return {name: getattr(self, name) for name in ARWKV7_OPTIONS}

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
