"""The config of a Qwen3.5 model, its state and its weights' names and shapes.

Symbols: D ``hidden_size``, Hk and Hv key and value heads of the gated delta net, K and V their
channels, W ``conv_size``, C = 2 Hk K + Hv V channels of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from model.architectures.config import check_positive
from model.architectures.hybrid import HybridConfig
from model.files import ConfigError
from model.tensor_spec import Shape, TensorSpec


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
