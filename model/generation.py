"""How a model's makers would draw its tokens: ``generation_config.json`` next to its weights.

As transformers writes it. It holds where a request says nothing; with ``do_sample`` false it says
nothing either. Which tokens end a text stands there too: see `model.tokenization.base`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from model.files import ConfigError, read_json
from model.tokenization.base import GENERATION_CONFIG

#: The least and the largest value of each field that counts.
RANGES = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (1e-9, 1.0),
    "top_n_sigma": (0.0, 100.0),
    "repetition_penalty": (0.01, 100.0),
}


def read_sampling(folder: Path) -> Mapping[str, float]:
    """The fields of `RANGES` in the file of ``folder``, none where there is no file.

    Raises `ConfigError` for one that is not a number in its range.
    """
    path = folder / GENERATION_CONFIG
    if not os.path.lexists(path):
        return {}
    values = read_json(path)
    if values.get("do_sample") is False:
        return {}
    found: dict[str, float] = {}
    for name, (least, most) in RANGES.items():
        value = values.get(name)
        if value is None:
            continue
        kinds = (int,) if isinstance(least, int) else (int, float)
        if type(value) not in kinds or not math.isfinite(value) or not least <= value <= most:
            raise ConfigError(
                f"{GENERATION_CONFIG}: {name} must be in {least:g}..{most:g}, not {value!r}"
            )
        found[name] = value if isinstance(least, int) else float(value)
    return found
