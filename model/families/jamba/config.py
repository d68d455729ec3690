"""The config of a Jamba, its state and its weights' names and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from model.architectures.config import check_positive, shared_fields
from model.architectures.hybrid import HybridConfig
from model.families.mamba.config import MambaConfig
from model.tensor_spec import Shape, TensorSpec


@dataclass(frozen=True)
class JambaConfig(HybridConfig):
    """Everything that decides the shapes of weights and state.

    The layers of ``attention_layers`` have attention without positions, the others a Mamba-1 whose
    dt, B and C are normed with weights.
    """

    model_type: ClassVar[str] = "everstream-jamba"
    attention: ClassVar[str] = "jamba"
    gated: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    interval: ClassVar[int] = 14
    options: ClassVar[tuple[str, ...]] = (
        *("attention_layers", "num_key_value_heads"),
        *("inner_size", "state_size", "conv_size", "dt_rank"),
    )

    vocab_size: int
    hidden_size: int = 2560
    num_hidden_layers: int = 28
    intermediate_size: int = 8192
    attention_layers: tuple[int, ...] = ()
    num_attention_heads: int = 20
    num_key_value_heads: int = 1
    head_dim: int = 128
    #: Without effect, as nothing turns.
    rope_theta: float = 1e4
    #: Of Mamba-1, as in `model.families.mamba.config`.
    inner_size: int = 5120
    state_size: int = 16
    conv_size: int = 4
    dt_rank: int = 160
    norm_eps: float = 1e-6
    tied: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 0
    max_context: int = 262144
    context: int = 0
    past: str = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "inner_size", "state_size", "dt_rank")

    @property
    def mamba(self) -> MambaConfig:
        """That of the Mamba-1 mixers."""
        norm = {"mixer_norm": True, "mixer_norm_eps": self.norm_eps}
        return MambaConfig(**shared_fields(self, MambaConfig) | norm)

    def other_state(self) -> dict[str, TensorSpec]:
        """See `MambaConfig.mixer_state`."""
        return self.mamba.mixer_state()

    def other_shapes(self) -> dict[str, Shape]:
        """See `MambaConfig.mixer_shapes`."""
        return self.mamba.mixer_shapes(norm_weights=True)
