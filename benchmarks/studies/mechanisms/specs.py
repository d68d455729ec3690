"""What is compared: a mechanism with its options, and shapes in which all have as many parameters.

The feed-forward layer makes up for what a mechanism has in addition to its projections:
it is narrower where there is a gate or a codebook.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.decode.models import own_parameters
from benchmarks.decode.shapes import matching_width
from model.architectures.config import Config
from model.attention import MECHANISMS, spec_of
from model.config import ConfigError, ModelConfig
from model.families.mamba.config import Mamba2Config
from model.families.rwkv7.config import Rwkv7Config
from model.state import StateLayout
from model.weights import num_parameters

BASELINE = "softmax"
#: Architectures that are no mechanism of `model.attention`, without options here.
FAMILIES = ("mamba2", "rwkv7")
MAMBA2_STATE_SIZE = 16
#: Widths of the feed-forward layer are multiples of this where 1 % allows it; odd ones are slow.
WIDTH_MULTIPLE = 8
MAX_PARAMETER_GAP = 0.01


@dataclass(frozen=True)
class Size:
    """A shape; ``intermediate_size`` is the baseline's."""

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int

    def num_parameters(self, vocab_size: int) -> int:
        """The baseline's."""
        return num_parameters(Spec(BASELINE).config(self, vocab_size))


SIZES = {
    "tiny": Size(hidden_size=64, num_layers=3, num_heads=2, head_dim=32, intermediate_size=160),
    "small": Size(hidden_size=128, num_layers=4, num_heads=4, head_dim=32, intermediate_size=320),
    "medium": Size(hidden_size=192, num_layers=4, num_heads=3, head_dim=64, intermediate_size=448),
}


@dataclass(frozen=True)
class Spec:
    """One competitor, written ``elu`` or ``elu:rotary=after,other=3``."""

    attention: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Raises `ConfigError` for an unknown mechanism or option, or a value of another type."""
        attention, _, rest = text.partition(":")
        if text in FAMILIES:
            return cls(text)
        known = {name: o.default for name, o in spec_of(attention).options.items()}
        options = []
        for part in filter(None, rest.split(",")):
            name, equals, value = part.partition("=")
            if not equals or name not in known:
                raise ConfigError(
                    f"{text!r}: {part!r} is not one of {attention}'s options"
                    f" ({', '.join(f'{n}={v}' for n, v in sorted(known.items())) or 'none'})"
                )
            options.append((name, _typed(value, known[name], text)))
        return cls(attention, tuple(sorted(options)))

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options)
        return f"{self.attention}:{options}" if options else self.attention

    @property
    def slug(self) -> str:
        """For file names: ``elu_rotary=after``."""
        return str(self).replace(":", "_").replace(",", "_")

    def config(self, size: Size, vocab_size: int, eos_token_id: int = 0) -> Config:
        """The model of ``size`` with this mechanism and, within 1 %, the baseline's parameters.

        Those of a family whose head is not its embedding are counted without the head. Raises
        `ConfigError` where no width of the feed-forward layer gets there.
        """
        if self.attention in FAMILIES:
            return _family(size, self.attention, vocab_size, eos_token_id)
        baseline = _shape(size, Spec(BASELINE), vocab_size, eos_token_id, size.intermediate_size)
        wanted = own_parameters(baseline, size.intermediate_size)
        own = _shape(size, self, vocab_size, eos_token_id, size.intermediate_size)
        exact = matching_width(lambda width: own_parameters(own, width), wanted)
        for width in (max(1, round(exact / WIDTH_MULTIPLE)) * WIDTH_MULTIPLE, exact):
            gap = own_parameters(own, width) / wanted - 1
            if abs(gap) <= MAX_PARAMETER_GAP:
                return _shape(size, self, vocab_size, eos_token_id, width)
        raise ConfigError(f"{self} cannot be made as large as {BASELINE}: {gap:+.1%}")


def all_specs() -> list[Spec]:
    """Every registered mechanism with its defaults."""
    return [Spec(name) for name in MECHANISMS]


def _family(size: Size, name: str, vocab_size: int, eos_token_id: int) -> Config:
    """A Mamba-2 or an RWKV-7 of the width of ``size``, of nearly the baseline's parameters.

    A Mamba-2 has no MLP, so it has half as many layers again, and the heads' width is what is
    chosen; of an RWKV-7 that of the MLP.
    """

    def made(width: int) -> Config:
        if name == "rwkv7":
            chosen = {
                "hidden_size": size.hidden_size,
                "num_hidden_layers": size.num_layers,
                "head_dim": size.head_dim,
                "intermediate_size": width,
            }
            return Rwkv7Config.for_training(vocab_size, eos_token_id, chosen)
        chosen = {
            "hidden_size": size.hidden_size,
            "num_hidden_layers": size.num_layers * 3 // 2,
            "num_attention_heads": 2 * size.num_heads,
            "head_dim": width,
            "attention_options": {"state_size": MAMBA2_STATE_SIZE},
        }
        return Mamba2Config.for_training(vocab_size, eos_token_id, chosen)

    head = vocab_size * size.hidden_size if name == "rwkv7" else 0
    wanted = size.num_parameters(vocab_size)
    width = matching_width(lambda width: num_parameters(made(width)) - head, wanted)
    config = made(width)
    gap = (num_parameters(config) - head) / wanted - 1
    if abs(gap) > MAX_PARAMETER_GAP:
        raise ConfigError(f"{name} cannot be made as large as {BASELINE}: {gap:+.1%}")
    return config


def state_bytes(config: Config) -> int | None:
    """Bytes of one session's state as we store it; None where it grows with the text."""
    if not config.constant_state:
        return None
    return StateLayout.of(config).num_bytes


def _shape(
    size: Size, spec: Spec, vocab_size: int, eos_token_id: int, intermediate_size: int
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        head_dim=size.head_dim,
        intermediate_size=intermediate_size,
        attention=spec.attention,
        attention_options=dict(spec.options),
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )


def _typed(value: str, default: object, text: str) -> object:
    """``value`` as the type that the option's default has."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(default, int | float | str):
            return type(default)(value)
    except (KeyError, ValueError):
        pass
    raise ConfigError(f"{text!r}: {value!r} is not {type(default).__name__}")
