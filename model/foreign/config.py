"""A foreign ``config.json``, of which every field is used, refused or known to be harmless.

What configs of decoders share is read by `read_decoder`, and rotary positions by `read_rotary`;
kinds of scaling that a family lacks are refused.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

from model.architectures.config import MAX_SIZE
from model.files import ConfigError, one_line
from model.weights import Array, check_num_layers, file_name

logger = logging.getLogger("everstream.models")

NO_FILES: Mapping[str, Array] = MappingProxyType({})
#: No number of a config comes near; beyond it are infinity, NaN and what no float holds.
MAX_NUMBER = 1e30
#: Why experts are refused.
DENSE_ALONE = "only the dense ones of this family are"

#: Fields that say nothing of what the network computes, whatever their value: names of programs and
#: of models, and options of training, of kernels and of what is returned. A name that is not among
#: these kinds may change the mathematics, and is refused.
NOT_COMPUTED = re.compile(
    r"(unsloth|axolotl|trl|peft|train|training|trainer|finetuning)_.+|_?model_(name|id)|base_model.*"
    r"|.*dropout.*|.+_pdrop|.*drop_path.*|.*layer_?drop.*|.*weight_decay|.*learning_rate.*"
    r"|(.+_)?initializer(_.+)?|init_(std|range|scale|method|device|fn)|.*xavier.*"
    r"|.+_init(_(std|range|scale|scheme|method|floor|gain))?|(.+_)?loss(_.+)?|.*aux_(loss|coef).*"
    r"|label_smoothing.*|(.+_)?gradient_checkpointing(_.+)?|(.+_)?dtype|fused?_.+|use_fused_.+"
    r"|_?attn_implementation.*|use_(flash|cuda|triton|liger|sdpa)(_(attn|attention|kernels?))?|cache_implementation"
    r"|output_(attentions|hidden_states|router_logits|scores|logits)|return_.+|(pad|unk)_token_id",
    re.IGNORECASE,
)
#: The version of a library: what a field so called has, unlike that of a mechanism ("v2", 7).
LIBRARY_VERSION = re.compile(r"\d+\.\d+[\w.+-]*")

#: Fields of any Hugging Face config that say nothing about what the network computes.
HARMLESS = frozenset(
    {
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
        *("_name_or_path", "_attn_implementation_autoset", "use_cache", "initializer_range"),
        *("return_dict", "output_attentions", "output_hidden_states", "torchscript"),
        *("id2label", "label2id", "problem_type", "task_specific_params", "is_encoder_decoder"),
        *("pad_token_id", "chunk_size_feed_forward", "gradient_checkpointing"),
    }
)


class ForeignConfig:
    """The fields that are left. A reader takes what it knows; `refuse_unknown` names the rest.

    ``files`` are the tensors that the config describes.
    """

    def __init__(self, values: dict[str, Any], files: Mapping[str, Array] = NO_FILES) -> None:
        # Null is how some programs write that a field is not there.
        self._left = {name: value for name, value in values.items() if value is not None}
        self.files = files
        self.family = str(self._left.pop("model_type"))

    def integer(self, name: str, default: int | None = None) -> int:
        """A field that must be a positive integer."""
        value = self._left.pop(name, default)
        if value is None:
            raise ConfigError(f"{self.family}: {name} is missing")
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self.family}: {name} must be a positive integer, not {value!r}")
        if value > MAX_SIZE:
            raise ConfigError(f"{self.family}: {name} must be at most {MAX_SIZE}, not {value}")
        return value

    def num_layers(self, name: str, default: int | None = None) -> int:
        """The same for the number of layers, for which the files must have enough keys.

        Every reader takes it from here, before it makes anything for each layer. Raises
        `CheckpointError` too.
        """
        num_layers = self.integer(name, default)
        check_num_layers(num_layers, len(self.files), file_name(self.files))
        return num_layers

    def number(self, name: str, default: float) -> float:
        """A field that must be a number, as float."""
        return self.as_number(name, self._left.pop(name, default))

    def scale(self, name: str) -> float:
        """A field that must be a positive number, as float; 1 where it is missing."""
        value = self.number(name, 1.0)
        if value <= 0.0:
            raise ConfigError(f"{self.family}: {name} must be positive, not {value}")
        return value

    def as_number(self, name: str, value: Any) -> float:
        """``value`` of a field called ``name``, which must be a finite number, as float."""
        if type(value) not in (int, float) or not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise ConfigError(f"{self.family}: {name} must be a number, not {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """A field that must be true or false."""
        value = self._left.pop(name, default)
        if type(value) is not bool:
            raise ConfigError(f"{self.family}: {name} must be a boolean, not {value!r}")
        return value

    def anything(self, name: str) -> Any:
        """A field as it is, or None."""
        return self._left.pop(name, None)

    def choice(self, name: str, default: object, *others: object) -> object:
        """A field of which only some values are supported; refuses the others by name."""
        value = self._left.pop(name, default)
        known = (default, *others)
        if not any(type(value) is type(k) and value == k for k in known):
            names = " or ".join(repr(k) for k in known)
            raise ConfigError(f"{self.family}: {name} {value!r} is not supported, only {names}")
        return value

    def only(self, **fields: object) -> None:
        """Fields of which one value is supported, which a config without them means too."""
        for name, value in fields.items():
            self.choice(name, value)

    def divisor(self, name: str, whole: int, default: int | None = None) -> int:
        """A field that must be a positive integer which divides ``whole``."""
        value = self.integer(name, default)
        if whole % value:
            raise ConfigError(f"{self.family}: {name} must divide {whole}, not {value}")
        return value

    def refuse_experts(self, name: str, found: object) -> None:
        """Raises `ConfigError` where ``found``: the file has experts, by its field ``name``."""
        if found:
            raise ConfigError(f"{self.family}: {name} is not supported: {DENSE_ALONE}")

    def special_id(self, name: str, vocab_size: int) -> int:
        """The id of a special token, the first where a list names several."""
        value = self._left.pop(name, None)
        ids = value if isinstance(value, list) and value else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise ConfigError(
                f"{self.family}: {name} must be in 0..{vocab_size - 1}, or a list, not {value!r}"
            )
        return int(ids[0])

    def __contains__(self, name: object) -> bool:
        """Whether a field is left."""
        return name in self._left

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives fields their usual names, by their other ones."""
        for name in [name for name in names if name in self._left]:
            self._left[names[name]] = self._left.pop(name)

    def ignore(self, *names: str) -> None:
        """Fields of this family that say nothing about what the network computes."""
        for name in names:
            self._left.pop(name, None)

    def refuse_unknown(self) -> None:
        """Raises `ConfigError` for a field that no reader took, unless it is not computed with."""
        left = sorted(self._left.keys() - HARMLESS)
        passed = [name for name in left if _is_not_computed(name, self._left[name])]
        if unknown := [name for name in left if name not in passed]:
            raise ConfigError(f"{self.family}: unknown field {unknown[0]!r}")
        self.ignore(*passed)
        if passed:
            logger.info(
                one_line(f"{self.family}: fields of training or of programs: {', '.join(passed)}")
            )


def _is_not_computed(name: str, value: object) -> bool:
    """Whether a field, known or not, cannot change what the network computes."""
    if name.lower().endswith("version"):
        return isinstance(value, str) and LIBRARY_VERSION.fullmatch(value) is not None
    return NOT_COMPUTED.fullmatch(name.rpartition(".")[2]) is not None


def read_decoder(
    source: ForeignConfig,
    eps: tuple[str, float],
    usual: Mapping[str, int | None],
    *,
    tied: bool = False,
) -> dict[str, Any]:
    """The fields of a `BoundedConfig` that folders of most families say in the same way.

    ``eps`` is the field of the norms' epsilon with its default, ``tied`` and ``usual`` are the
    defaults of others. Without one there is a key head for each head, heads divide the width, and
    other fields must be there, as one whose default is None. Raises `ConfigError` or
    `CheckpointError`.
    """

    def size(name: str, default: int | None = None) -> int:
        return source.integer(name, usual.get(name, default))

    vocab_size, width, heads = map(size, ("vocab_size", "hidden_size", "num_attention_heads"))
    num_layers = usual.get("num_hidden_layers")
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": source.num_layers("num_hidden_layers", num_layers),
        "intermediate_size": size("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("num_key_value_heads", heads),
        "head_dim": size("head_dim", width // heads),
        "norm_eps": source.number(*eps),
        "tied": source.boolean("tie_word_embeddings", tied),
        "bos_token_id": source.special_id("bos_token_id", vocab_size),
        "eos_token_id": source.special_id("eos_token_id", vocab_size),
        "max_context": size("max_position_embeddings"),
    }


NOTHING: Set[str] = frozenset()


#: The fields of each kind of scaling that `scaled` knows, and its default.
SCALINGS: dict[str, dict[str, float]] = {
    "linear": {"factor": 1.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192.0,
    },
}


class Rotary(NamedTuple):
    """The base of the rotation, and the part of a head's channels that turns.

    ``scaling`` is a kind of `SCALINGS` or none, with its numbers.
    """

    theta: float
    part: float = 1.0
    scaling: str = ""
    numbers: Mapping[str, float] = {}

    def factors(self, head_dim: int) -> tuple[float, ...]:
        """What the frequency of each pair of channels is divided by; none without scaling.

        "llama3" (Llama 3.1's config): frequencies whose wave is longer than
        original / low_freq_factor positions are divided by ``factor``, those whose wave is shorter
        than original / high_freq_factor stay, and those between are interpolated.
        """
        if not self.scaling:
            return ()
        pairs, numbers = head_dim // 2, self.numbers
        factor = numbers["factor"]
        if self.scaling == "linear":
            return (factor,) * pairs
        low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
        found = []
        for pair in range(pairs):
            waves = numbers["original_max_position_embeddings"] / (
                2 * math.pi * self.theta ** (pair / pairs)
            )
            smooth = min(max((waves - low) / (high - low), 0.0), 1.0)
            found.append(1.0 / ((1.0 - smooth) / factor + smooth))
        return tuple(found)


def read_rotary(
    source: ForeignConfig,
    theta: float,
    part: float | None = None,
    ignored: Set[str] = NOTHING,
    scalings: Sequence[str] = (),
) -> Rotary:
    """``theta`` and ``part`` are the defaults, ``ignored`` fields that say nothing of text.

    ``scalings`` are the kinds of `SCALINGS` that the family has.

    Without ``part`` all channels turn, and a field for it is unknown.

    Older files hold the base next to ``rope_scaling``, newer ones inside ``rope_parameters``.
    """
    family, scaling, numbers = source.family, "", dict[str, float]()
    values: dict[str, Any] = {"rope_theta": source.number("rope_theta", theta)}
    if part is not None:
        values["partial_rotary_factor"] = source.number("partial_rotary_factor", part)
    for field in ("rope_scaling", "rope_parameters"):
        found = source.anything(field)
        if found is None:
            continue
        if not isinstance(found, dict):
            raise ConfigError(f"{family}: {field} must be an object, not {found!r}")
        kind = found.get("rope_type", found.get("type", "default"))
        if kind not in ("default", *scalings):
            known = " or ".join(map(repr, ("default", *scalings)))
            raise ConfigError(f"{family}: {field} of type {kind!r} is not supported, only {known}")
        defaults = SCALINGS.get(kind, {})
        found = {name: value for name, value in found.items() if value is not None}
        unknown = sorted(found.keys() - {"rope_type", "type", *values, *defaults} - ignored)
        if unknown:
            raise ConfigError(f"{family}: unknown field {field}.{unknown[0]}")
        values |= {name: found[name] for name in values if name in found}
        if defaults:
            scaling = kind
            numbers = {
                name: source.as_number(f"{field}.{name}", found.get(name, default))
                for name, default in defaults.items()
            }
            _check_scaling(family, field, numbers)
    base, *parts = (source.as_number(name, value) for name, value in values.items())
    return Rotary(base, parts[0] if parts else 1.0, scaling, numbers)


def _check_scaling(family: str, field: str, numbers: Mapping[str, float]) -> None:
    """Raises `ConfigError` for numbers that give no frequencies."""
    for name, value in numbers.items():
        if value <= 0:
            raise ConfigError(f"{family}: {field}.{name} must be positive, not {value}")
    if numbers.get("low_freq_factor", 0.0) >= numbers.get("high_freq_factor", 1.0):
        raise ConfigError(f"{family}: {field}.low_freq_factor must be below high_freq_factor")
