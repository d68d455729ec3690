"""The config of a Qwen3.5 model, its state and its weights' names and shapes.

Symbols: D ``hidden_size``, Hk and Hv key and value heads of the gated delta net, K and V their
channels, W ``conv_size``, C = 2 Hk K + Hv V channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from model.architectures.config import check_positive
from model.architectures.hybrid import HybridConfig
from model.files import ConfigError
from model.tensor_spec import Shape, TensorSpec

#: Positions that a multi-token head attends to: it only drafts.
MTP_CONTEXT = 1024
#: What it joins, each normed, and the beginnings of the names of weights that are its model's.
MTP_INPUTS, SHARED = ("embedding", "hidden"), ("embedding.", "head.")


@dataclass(frozen=True)
class Qwen35Config(HybridConfig):
    """Everything that decides the shapes of weights and state."""

    model_type: ClassVar[str] = "everstream-qwen35"
    attention: ClassVar[str] = "qwen35"
    gated: ClassVar[bool] = True
    interval: ClassVar[int] = 4
    options: ClassVar[tuple[str, ...]] = (
        *("attention_layers", "num_key_value_heads", "rotary_dim"),
        *("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_size"),
    )

    vocab_size: int
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    intermediate_size: int = 3584
    attention_layers: tuple[int, ...] = ()
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 256
    #: Channels of a head of attention that have rotary positions.
    rotary_dim: int = 64
    rope_theta: float = 1e7
    #: Of the gated delta net. Value head j has key head ``j Hk // Hv``.
    num_key_heads: int = 16
    num_value_heads: int = 16
    key_head_dim: int = 128
    value_head_dim: int = 128
    conv_size: int = 4
    norm_eps: float = 1e-6
    tied: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 0
    max_context: int = 4096
    context: int = 0
    past: str = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        check_positive(self, "rotary_dim")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ConfigError(
                f"rotary_dim must be even and at most {self.head_dim}, not {self.rotary_dim}"
            )
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"num_key_heads must divide {self.num_value_heads}, not {self.num_key_heads}"
            )

    @property
    def conv_channels(self) -> int:
        """C."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_channels

    @property
    def value_channels(self) -> int:
        """Hv V."""
        return self.num_value_heads * self.value_head_dim

    def other_state(self) -> dict[str, TensorSpec]:
        """The last inputs of the convolution [W - 1, C], oldest first, and S [Hv, K, V]."""
        sums = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        return {
            "conv": TensorSpec((self.conv_size - 1, self.conv_channels)),
            "S": TensorSpec(sums, is_sum=True),
        }

    def other_shapes(self) -> dict[str, Shape]:
        """Of a gated delta net; rows of ``qkv`` are q, then k, then v."""
        width, heads, channels = self.hidden_size, self.num_value_heads, self.conv_channels
        return {
            "qkv.weight": (channels, width),
            "z.weight": (self.value_channels, width),
            "b.weight": (heads, width),
            "a.weight": (heads, width),
            "conv": (channels, self.conv_size),
            "A_log": (heads,),
            "dt_bias": (heads,),
            "norm.weight": (self.value_head_dim,),
            "out.weight": (width, self.value_channels),
        }


@dataclass(frozen=True)
class Qwen35MtpConfig(Qwen35Config):
    """A multi-token head: one layer of attention, with the embedding and the head of its model.

    A position of its past is a token and the hidden state before that.
    """

    @classmethod
    def of(cls, config: Qwen35Config) -> Self:
        """That of a model."""
        values: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(config)}
        context = min(config.context or MTP_CONTEXT, MTP_CONTEXT)
        values |= {"num_hidden_layers": 1, "attention_layers": (0,)}
        return cls(**values | {"context": context, "past": "slide"})

    def weight_shapes(self) -> dict[str, Shape]:
        """See `model.architectures.config.Config`; what is the model's is left out."""
        width, shapes = self.hidden_size, super().weight_shapes()
        own = {name: shape for name, shape in shapes.items() if not name.startswith(SHARED)}
        norms: dict[str, Shape] = {f"{name}_norm.weight": (width,) for name in MTP_INPUTS}
        return {"join.weight": (width, 2 * width), **norms, **own}
