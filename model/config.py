"""The shape of a model, from which the bytes of a session's state follow.

The JSON form keeps the key names of Hugging Face's ``config.json`` where they
have one, so that tools which read those files read ours too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from model.architectures.config import JsonConfig, check_epsilon, check_positive, check_token_ids
from model.attention import spec_of
from model.files import ConfigError, read_json
from model.tensor_spec import Shape, TensorSpec

__all__ = ["MODEL_TYPE", "ConfigError", "ModelConfig", "read_json"]

MODEL_TYPE = "everstream"

_CHOICES = {"norm": ("rms", "layer"), "mlp": ("swiglu", "gelu")}
_KINDS = {
    "tie_word_embeddings": (bool, "a boolean"),
    "attention_bias": (bool, "a boolean"),
    "attention": (str, "a string"),
    "attention_options": (dict, "an object"),
}

#: Written only where they are not the default: a file from before them keeps its bytes and digest.
_ADDED_LATER = ("attention_bias", "norm", "mlp", "max_position_embeddings")


@dataclass(frozen=True)
class ModelConfig(JsonConfig):
    """Everything that decides the shapes of weights and state.

    The defaults of the last four fields are the project's own models; the other
    values are there for checkpoints of other families (`model.foreign`):
    ``norm`` "layer" and ``mlp`` "gelu" have biases as in GPT-2, and
    ``max_position_embeddings`` above 0 is the length of a table of learned
    positions that is added to the embeddings. A stream that is longer keeps
    the table's last row. ``rms_norm_eps`` is the epsilon of either norm.

    ``attention_options`` holds what only one mechanism understands (``gated``
    reads ``conv_size``, for example); the mechanism validates it and refuses
    unknown keys.
    """

    model_type: ClassVar[str] = MODEL_TYPE
    added_later: ClassVar[tuple[str, ...]] = _ADDED_LATER

    vocab_size: int
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 704
    attention: str = "gated"
    attention_options: dict[str, Any] = field(default_factory=dict)
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 0
    attention_bias: bool = False
    norm: str = "rms"
    mlp: str = "swiglu"
    max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "hidden_size", "num_hidden_layers")
        check_positive(self, "num_attention_heads", "head_dim", "intermediate_size")
        check_token_ids(self, "bos_token_id", "eos_token_id")
        check_epsilon(self, "rms_norm_eps")
        for name, (kind, words) in _KINDS.items():
            if type(getattr(self, name)) is not kind:
                raise ConfigError(f"{name} must be {words}, not {getattr(self, name)!r}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be {' or '.join(known)}, not {getattr(self, name)!r}"
                )
        value = self.max_position_embeddings
        if type(value) is not int or value < 0:
            raise ConfigError(f"max_position_embeddings must be 0 or more, not {value!r}")
        spec_of(self.attention).check(self)

    @classmethod
    def for_training(
        cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]
    ) -> ModelConfig:
        """See `model.architectures.config.Config`."""
        values = {"attention": "delta", **chosen}
        return cls(vocab_size, bos_token_id=eos_token_id, eos_token_id=eos_token_id, **values)

    @property
    def constant_state(self) -> bool:
        """See `model.architectures.config.Config`."""
        return spec_of(self.attention).constant_state

    def layer_states(self) -> Sequence[dict[str, TensorSpec]]:
        """See `model.architectures.config.Config`; every layer has the same tensors."""
        if not self.constant_state:
            raise ConfigError(
                f"attention {self.attention!r} has no constant state: `everstream convert` gives it"
                " one that has (docs/contribute/convert.md)"
            )
        return [spec_of(self.attention).state_spec(self)] * self.num_hidden_layers

    def weight_shapes(self) -> dict[str, Shape]:
        """See `model.architectures.config.Config`."""
        return _weight_shapes(self)

    def fixed_weights(self) -> frozenset[str]:
        """Fixed features, and codebooks without a gradient."""
        layers, names = range(self.num_hidden_layers), spec_of(self.attention).fixed_weights(self)
        return frozenset(f"blocks.{layer}.attention.{name}" for layer in layers for name in names)


def _weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Those of `model.lm.LanguageModel`."""
    width, inner = config.hidden_size, config.intermediate_size
    gelu = config.mlp == "gelu"
    block = {
        **_norm("attention_norm", config),
        **_norm("mlp_norm", config),
        "mlp.up.weight": (inner if gelu else 2 * inner, width),
        "mlp.down.weight": (width, inner),
        **({"mlp.up.bias": (inner,), "mlp.down.bias": (width,)} if gelu else {}),
    }
    attention = spec_of(config.attention).weight_shapes(config)
    block |= {f"attention.{name}": shape for name, shape in attention.items()}
    shapes = {"embedding.weight": (config.vocab_size, width), **_norm("norm", config)}
    if config.max_position_embeddings:
        shapes["position_embedding.weight"] = (config.max_position_embeddings, width)
    if not config.tie_word_embeddings:
        shapes["head.weight"] = (config.vocab_size, width)
    for layer in range(config.num_hidden_layers):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def _norm(name: str, config: ModelConfig) -> dict[str, Shape]:
    kinds = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds}
