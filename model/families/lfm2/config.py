"""The config of an LFM2 model, its state and its weights' names and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from model.architectures.hybrid import HybridConfig
from model.files import ConfigError
from model.tensor_spec import Shape, TensorSpec


@dataclass(frozen=True)
class Lfm2Config(HybridConfig):
    """Everything that decides the shapes of weights and state."""

    model_type: ClassVar[str] = "everstream-lfm2"
    attention: ClassVar[str] = "lfm2"
    gated: ClassVar[bool] = False
    interval: ClassVar[int] = 3
    options: ClassVar[tuple[str, ...]] = ("attention_layers", "num_key_value_heads", "conv_size")

    vocab_size: int
    hidden_size: int = 1024
    num_hidden_layers: int = 16
    #: The width inside the MLP, as the weights have it.
    intermediate_size: int = 4608
    attention_layers: tuple[int, ...] = ()
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 64
    rope_theta: float = 1e6
    conv_size: int = 3
    norm_eps: float = 1e-5
    tied: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 0
    max_context: int = 4096
    context: int = 0
    past: str = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, not {self.head_dim}")

    def other_state(self) -> dict[str, TensorSpec]:
        """The last inputs of the convolution [W - 1, D], oldest first."""
        return {"conv": TensorSpec((self.conv_size - 1, self.hidden_size))}

    def other_shapes(self) -> dict[str, Shape]:
        """Of a gated short convolution; rows of ``in`` are the gates B and C, then its input."""
        width = self.hidden_size
        return {
            "in.weight": (3 * width, width),
            "conv": (width, self.conv_size),
            "out.weight": (width, width),
        }
