"""The config of a hybrid over Mamba-2, its state and its weights' names and shapes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from model.architectures.config import check_positive, shared_fields
from model.architectures.hybrid import HybridConfig
from model.families.mamba.config import Mamba2Config
from model.files import ConfigError
from model.tensor_spec import Shape, TensorSpec

#: No multiplier of a published model is near.
MAX_SCALE = 1e4


@dataclass(frozen=True)
class Mamba2HybridConfig(HybridConfig):
    """Everything that decides the shapes of weights and state, and the scales of sums.

    A layer of `attention_layers` has attention, one of `mamba_layers` a Mamba-2, and one of both
    adds the two up, of the same normed input. One of neither is an MLP of squared ReLU; if there is
    such a layer, no other has an MLP (`ends_with_mlp`), and otherwise each ends with SwiGLU.
    """

    model_type: ClassVar[str] = "everstream-mamba2-hybrid"
    attention: ClassVar[str] = "mamba2_hybrid"
    gated: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    interval: ClassVar[int] = 8
    options: ClassVar[tuple[str, ...]] = (
        *("attention_layers", "mamba_layers", "num_key_value_heads", "rotary_dim"),
        *("num_mamba_heads", "mamba_head_dim", "state_size", "num_groups", "conv_size"),
    )

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 32
    intermediate_size: int = 2048
    attention_layers: tuple[int, ...] = ()
    #: Indices, in their order; None is all that are not attention.
    mamba_layers: tuple[int, ...] | None = None
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
    mixer_norm: bool = True
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
        if self.mamba_layers is not None:
            self._set_layers("mamba_layers")
            if all(map(operator.ne, self.is_attention, self.is_mamba)):
                self._set("mamba_layers", None)
        check_positive(self, "num_mamba_heads", "mamba_head_dim")
        self._check_rotary("rotary_dim")
        _ = self.mamba  # which checks the other fields of the mixers
        for name in ("embedding_scale", "residual_scale", "attention_scale"):
            value, may_be_zero = getattr(self, name), name == "attention_scale"
            is_float = type(value) is float and 0.0 <= value <= MAX_SCALE
            if not is_float or not (value or may_be_zero):
                raise ConfigError(f"{name} must be a float up to {MAX_SCALE:.0f}, not {value!r}")

    @property
    def attention_options(self) -> dict[str, Any]:
        """See `model.architectures.config.Config`."""
        layers = [layer for layer, is_mamba in enumerate(self.is_mamba) if is_mamba]
        return super().attention_options | {"mamba_layers": layers}

    @property
    def mamba(self) -> Mamba2Config:
        """That of the Mamba-2 mixers."""
        heads = {"num_attention_heads": self.num_mamba_heads, "head_dim": self.mamba_head_dim}
        return Mamba2Config(**shared_fields(self, Mamba2Config) | heads)

    @property
    def is_mamba(self) -> list[bool]:
        """Of each layer."""
        if self.mamba_layers is None:
            return [not is_attention for is_attention in self.is_attention]
        layers = set(self.mamba_layers)
        return [layer in layers for layer in range(self.num_hidden_layers)]

    @property
    def ends_with_mlp(self) -> bool:
        """See `model.architectures.hybrid.mlp_size`."""
        return all(map(operator.or_, self.is_attention, self.is_mamba))

    @property
    def has_other(self) -> list[bool]:
        """See `HybridConfig`."""
        return self.is_mamba

    def mixer_shapes(self, is_attention: bool, has_other: bool) -> dict[str, Shape]:
        """See `HybridConfig`; of both mixers, or of an MLP."""
        if is_attention and has_other:
            parts = {"attention": self.attention_shapes(), "mamba": self.other_shapes()}
            return {f"{part}.{n}": s for part, shapes in parts.items() for n, s in shapes.items()}
        if is_attention or has_other:
            return super().mixer_shapes(is_attention, has_other)
        width, inner = self.hidden_size, self.intermediate_size
        return {"up.weight": (inner, width), "down.weight": (width, inner)}

    def other_state(self) -> dict[str, TensorSpec]:
        """See `Mamba2Config.mixer_state`."""
        return self.mamba.mixer_state()

    def other_shapes(self) -> dict[str, Shape]:
        """See `Mamba2Config.mixer_shapes`."""
        return self.mamba.mixer_shapes()
