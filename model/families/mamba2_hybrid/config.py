"""The config of a hybrid over Mamba-2, its state and its weights' names and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from model.architectures.config import check_positive
from model.architectures.hybrid import HybridConfig
from model.families.mamba.config import Mamba2Config
from model.files import ConfigError
from model.tensor_spec import Shape, TensorSpec

#: No multiplier of a published model is near.
MAX_SCALE = 1e4


@dataclass(frozen=True)
class Mamba2HybridConfig(HybridConfig):
    """Everything that decides the shapes of weights and state, and the scales of sums.

    A layer is attention or a Mamba-2, and an MLP.
    """

    model_type: ClassVar[str] = "everstream-mamba2-hybrid"
    attention: ClassVar[str] = "mamba2_hybrid"
    gated: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    interval: ClassVar[int] = 8
    options: ClassVar[tuple[str, ...]] = (
        *("attention_layers", "num_key_value_heads", "rotary_dim"),
        *("num_mamba_heads", "mamba_head_dim", "state_size", "num_groups", "conv_size"),
    )

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 32
    intermediate_size: int = 2048
    attention_layers: tuple[int, ...] = ()
    num_attention_heads: int = 12
    num_key_value_heads: int = 4
    head_dim: int = 64
    #: Channels of a head of attention that have rotary positions; 0 for none.
    rotary_dim: int = 0
    rope_theta: float = 1e4
    #: Of Mamba-2, as in `model.families.mamba.config`.
    num_mamba_heads: int = 48
    mamba_head_dim: int = 32
    state_size: int = 128
    num_groups: int = 1
    conv_size: int = 4
    #: What embeddings are multiplied with, and all that is added to the residual stream.
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    #: What the scores of attention are multiplied with; 0 is ``head_dim ** -0.5``.
    attention_scale: float = 0.0
    norm_eps: float = 1e-5
    tied: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 0
    max_context: int = 4096
    context: int = 0
    past: str = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_mamba_heads", "mamba_head_dim", "state_size", "num_groups")
        rotary = self.rotary_dim
        if type(rotary) is not int or rotary % 2 or not 0 <= rotary <= self.head_dim:
            raise ConfigError(f"rotary_dim must be even and in 0..{self.head_dim}, not {rotary!r}")
        if self.num_mamba_heads % self.num_groups:
            raise ConfigError(
                f"num_groups must divide {self.num_mamba_heads} heads, not {self.num_groups}"
            )
        for name in ("embedding_scale", "residual_scale", "attention_scale"):
            value, may_be_zero = getattr(self, name), name == "attention_scale"
            is_float = type(value) is float and 0.0 <= value <= MAX_SCALE
            if not is_float or not (value or may_be_zero):
                raise ConfigError(f"{name} must be a float up to {MAX_SCALE:.0f}, not {value!r}")

    @property
    def mamba(self) -> Mamba2Config:
        """That of the Mamba-2 mixers."""
        return Mamba2Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_mamba_heads,
            head_dim=self.mamba_head_dim,
            state_size=self.state_size,
            num_groups=self.num_groups,
            conv_size=self.conv_size,
            norm_eps=self.norm_eps,
        )

    def other_state(self) -> dict[str, TensorSpec]:
        """See `Mamba2Config.mixer_state`."""
        return self.mamba.mixer_state()

    def other_shapes(self) -> dict[str, Shape]:
        """See `Mamba2Config.mixer_shapes`."""
        return self.mamba.mixer_shapes()
