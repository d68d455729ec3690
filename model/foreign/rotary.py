"""The rotary positions that a config asks for, of which the scaled kinds are refused by name."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

from model.files import ConfigError
from model.foreign.config import ForeignConfig

NOTHING: Set[str] = frozenset()


class Rotary(NamedTuple):
    """The base of the rotation, and the part of a head's channels that turns."""

    theta: float
    part: float = 1.0


def read_rotary(
    source: ForeignConfig, theta: float, part: float | None = None, ignored: Set[str] = NOTHING
) -> Rotary:
    """``theta`` and ``part`` are the defaults, ``ignored`` fields that say nothing of text.

    Without ``part`` all channels turn, and a field for it is unknown.

    Older files hold the base next to ``rope_scaling``, newer ones inside ``rope_parameters``.
    """
    family = source.family
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
        if kind != "default":
            raise ConfigError(
                f"{family}: {field} of type {kind!r} is not supported, only 'default'"
            )
        found = {name: value for name, value in found.items() if value is not None}
        unknown = sorted(found.keys() - {"rope_type", "type", *values} - ignored)
        if unknown:
            raise ConfigError(f"{family}: unknown field {field}.{unknown[0]}")
        values |= {name: found[name] for name in values if name in found}
    numbers = [source.as_number(name, value) for name, value in values.items()]
    return Rotary(*numbers)
