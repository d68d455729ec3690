"""The config of an architecture: what is known of a model without its weights.

A ``config.json`` of ours also says of int4 weights, under `QUANTIZATION`, how they are stored, and
the name of the text that their rounding was calibrated with, or null. Whatever does not know the
key refuses the folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from model.files import ConfigError, read_json
from model.tensor_spec import STATE_DTYPES, Shape, StateDType, TensorSpec

#: Far above the sizes of published models; a damaged file must not make us allocate gigabytes.
MAX_SIZE = 1 << 24


class Config(Protocol):
    """What every part of the server may use of a model's config. Immutable and validated."""

    model_type: ClassVar[str]

    @classmethod
    def for_training(cls, vocab_size: int, eos_token_id: int, chosen: Mapping[str, Any]) -> Config:
        """A new model of this family; ``eos_token_id`` begins and ends its texts.

        ``chosen`` has what a user may choose in any family, by the names of the properties
        below: ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``head_dim``,
        ``attention`` and ``attention_options``; and ``intermediate_size``, the width inside the
        MLP. The family decides what is not in it. Raises `ConfigError`.
        """

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def bos_token_id(self) -> int: ...
    @property
    def eos_token_id(self) -> int: ...

    @property
    def attention(self) -> str:
        """The name of the token mixing, as users see it."""

    @property
    def attention_options(self) -> Mapping[str, Any]:
        """What else decides the shapes of the token mixing, for users to read."""

    @property
    def constant_state(self) -> bool:
        """False where the state grows with the text, up to a bound if there is a ``context``."""

    @property
    def context(self) -> int:
        """Positions that attention layers keep, in whole blocks; 0 where there is no bound."""

    @property
    def max_context(self) -> int:
        """The longest text that a model with a bound was made for; 0 without one."""

    @property
    def past(self) -> str:
        """What happens at the bound: see `model.architectures.hybrid`."""

    @property
    def state_dtype(self) -> StateDType:
        """What a session's block has the sums of a state in, see `with_state_dtype`."""

    def layer_states(self) -> Sequence[Mapping[str, TensorSpec]]:
        """The state tensors of each layer as a step computes them, in their order in the block.

        Raises `ConfigError` where the state grows without a bound.
        """

    def weight_shapes(self) -> dict[str, Shape]:
        """The names and shapes of all weights, as a checkpoint holds them."""

    def fixed_weights(self) -> frozenset[str]:
        """Those of `weight_shapes` that no gradient trains."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""

    def save(self, path: Path) -> None:
        """Writes the JSON form. Raises OSError."""


@dataclass(frozen=True)
class JsonConfig:
    """The JSON form of a config that is a dataclass: its fields and a ``model_type``.

    Without ``state_dtype``, which an operator chooses and no file of a model has.
    """

    model_type: ClassVar[str]
    #: Fields written only where they are not the default: older files keep their bytes and digest.
    added_later: ClassVar[tuple[str, ...]] = ()

    state_dtype: StateDType = dataclasses.field(default="float32", kw_only=True, repr=False)

    @property
    def context(self) -> int:
        """See `Config`; a family with a bound has a field of this name."""
        return 0

    @property
    def max_context(self) -> int:
        """See `Config`; a family with a bound has a field of this name."""
        return 0

    @property
    def past(self) -> str:
        """See `Config`; a family with a bound has a field of this name."""
        return "stop"

    def to_dict(self) -> dict[str, Any]:
        """The fields plus ``model_type``, ready for JSON."""
        values = dataclasses.asdict(self)
        del values["state_dtype"]
        for added in dataclasses.fields(self):
            if added.name in self.added_later and values[added.name] == added.default:
                del values[added.name]
        return {"model_type": self.model_type, **values}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises `ConfigError` for another ``model_type`` and for unknown or
        missing fields.
        """
        values = dict(values)
        model_type = values.pop("model_type", None)
        if model_type != cls.model_type:
            raise ConfigError(f"model_type must be {cls.model_type!r}, not {model_type!r}")
        fields = [field for field in dataclasses.fields(cls) if field.name != "state_dtype"]
        unknown = sorted(values.keys() - {field.name for field in fields})
        if unknown:
            raise ConfigError(f"unknown field {unknown[0]!r}")
        for field in fields:
            no_default = field.default is field.default_factory is dataclasses.MISSING
            if no_default and field.name not in values:
                raise ConfigError(f"{field.name} is missing")
        return cls(**values)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads ``config.json``; raises `ConfigError` where it is not one."""
        return cls.from_dict(read_json(path))


def take_chosen(
    chosen: Mapping[str, Any], attention: str, options: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``chosen`` of `Config.for_training` in two parts: the sizes, and the ``attention_options``.

    Raises `ConfigError` for another ``attention``, and for options that are not ``options``.
    """
    sizes = dict(chosen)
    name, found = sizes.pop("attention", None), sizes.pop("attention_options", {})
    if name not in (None, attention):
        raise ConfigError(f"attention must be {attention!r}, not {name!r}")
    if not isinstance(found, dict) or found.keys() - set(options):
        names = ", ".join(options)
        raise ConfigError(f"attention_options must be an object of {names}, not {found!r}")
    return sizes, found


def shared_fields(config: JsonConfig, other: type[JsonConfig]) -> dict[str, Any]:
    """The fields of ``config`` that another family, such as that of its mixers, has too."""
    names = {field.name for field in dataclasses.fields(config)}
    shared = (field.name for field in dataclasses.fields(other) if field.name in names)
    return {name: getattr(config, name) for name in shared}


def with_state_dtype(config: Config, dtype: StateDType) -> Config:
    """``config`` with the sums of a session's state stored in ``dtype``.

    Raises `ConfigError` for an unknown one, and for bfloat16 where a state has no sums.
    """
    if dtype not in STATE_DTYPES:
        raise ConfigError(f"--state-dtype must be {' or '.join(STATE_DTYPES)}, not {dtype!r}")
    if dtype == "bfloat16" and not has_sums(config):
        raise ConfigError(
            f"--state-dtype bfloat16 is for models with recurrent sums: a state of"
            f" {config.attention} has none"
        )
    assert isinstance(config, JsonConfig), config
    return dataclasses.replace(config, state_dtype=dtype)


def has_sums(config: Config) -> bool:
    """Whether a session's state has sums. Raises `ConfigError` where it grows without a bound."""
    return any(spec.is_sum for layer in config.layer_states() for spec in layer.values())


def check_positive(config: object, *names: str) -> None:
    """Raises `ConfigError` where a field is not a positive integer, or larger than any size."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} must be a positive integer, not {value!r}")
        if value > MAX_SIZE:
            raise ConfigError(f"{name} must be at most {MAX_SIZE}, not {value}")


def check_booleans(config: object, *names: str) -> None:
    """Raises `ConfigError` where a field is not a boolean."""
    for name in names:
        if type(value := getattr(config, name)) is not bool:
            raise ConfigError(f"{name} must be a boolean, not {value!r}")


def check_token_ids(config: Config, *names: str) -> None:
    """Raises `ConfigError` where a field is not an id of the vocabulary."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or not 0 <= value < config.vocab_size:
            raise ConfigError(f"{name} must be in 0..{config.vocab_size - 1}, not {value!r}")


def check_epsilon(config: object, *names: str) -> None:
    """Raises `ConfigError` where a field is not a float between 0 and 1."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not float or not 0.0 < value < 1.0:
            raise ConfigError(f"{name} must be in (0, 1), not {value!r}")


QUANTIZATION = "quantization"
_INT4 = {"bits": 4, "group_size": 32}


def stated_quantization(calibration: str | None) -> dict[str, Any]:
    """The value of `QUANTIZATION` for weights calibrated with a text of this name, or without."""
    return {**_INT4, "calibration": calibration}


def calibration_of(values: Mapping[str, Any]) -> str | None:
    """The text that int4 weights were calibrated with; None also where they are not int4.

    Raises `ConfigError` for weights that are stored in another way.
    """
    value = values.get(QUANTIZATION)
    if value is None:
        return None
    name = value.get("calibration") if isinstance(value, dict) else None
    if value != stated_quantization(name) or not isinstance(name, str | None):
        raise ConfigError(f"{QUANTIZATION} must be {_INT4} and a calibration, not {value!r}")
    return name
