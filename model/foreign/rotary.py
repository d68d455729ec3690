"""The rotary positions that a config asks for; kinds of scaling that a family lacks are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from model.files import ConfigError
from model.foreign.config import ForeignConfig

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
