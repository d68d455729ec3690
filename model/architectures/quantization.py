"""What a ``config.json`` of ours says of int4 weights, under `KEY`.

That is how they are stored, and the name of the text that their rounding was calibrated with, or
null. Whatever does not know the key refuses the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.files import ConfigError

KEY = "quantization"
_INT4 = {"bits": 4, "group_size": 32}


def stated(calibration: str | None) -> dict[str, Any]:
    """The value of `KEY` for weights that were calibrated with a text of this name, or without."""
    return {**_INT4, "calibration": calibration}


def calibration_of(values: Mapping[str, Any]) -> str | None:
    """The text that int4 weights were calibrated with; None also where they are not int4.

    Raises `ConfigError` for weights that are stored in another way.
    """
    value = values.get(KEY)
    if value is None:
        return None
    name = value.get("calibration") if isinstance(value, dict) else None
    if value != stated(name) or not isinstance(name, str | None):
        raise ConfigError(f"{KEY} must be {_INT4} and a calibration, not {value!r}")
    return name
