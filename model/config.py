"""The shape of a model, from which the bytes of a session's state follow.

The JSON form keeps the key names of Hugging Face's ``config.json`` where they
have one, so that tools which read those files read ours too.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


class ConfigError(ValueError):
    """A configuration that cannot be a model. The message names the field."""


@dataclass(frozen=True)
class ModelConfig:
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
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "head_dim",
            "intermediate_size",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer, not {value!r}")
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < self.vocab_size:
                raise ConfigError(f"{name} must be in 0..{self.vocab_size - 1}, not {value!r}")
        if type(self.rms_norm_eps) is not float or not 0.0 < self.rms_norm_eps < 1.0:
            raise ConfigError(f"rms_norm_eps must be in (0, 1), not {self.rms_norm_eps!r}")
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
        # Imported here because the specs are written against this class.
        from model.attention import spec_of

        spec_of(self.attention).check(self)

    def to_dict(self) -> dict[str, Any]:
        """The fields plus ``model_type``, ready for JSON."""
        values = dataclasses.asdict(self)
        for added in dataclasses.fields(self):
            if added.name in _ADDED_LATER and values[added.name] == added.default:
                del values[added.name]
        return {"model_type": MODEL_TYPE, **values}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`.

        Raises `ConfigError` for another ``model_type`` and for unknown or
        missing fields.
        """
        values = dict(values)
        model_type = values.pop("model_type", None)
        if model_type != MODEL_TYPE:
            raise ConfigError(f"model_type must be {MODEL_TYPE!r}, not {model_type!r}")
        unknown = sorted(values.keys() - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ConfigError(f"unknown field {unknown[0]!r}")
        if "vocab_size" not in values:
            raise ConfigError("vocab_size is missing")
        return cls(**values)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Reads ``config.json``; raises `ConfigError` where it is not one."""
        return cls.from_dict(read_json(path))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `ConfigError` where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return values
