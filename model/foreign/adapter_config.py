"""``adapter_config.json`` of the package ``peft``: what it says of how a file is merged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.files import read_json
from model.weights import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
#: Values that change what is merged, and those of them that are supported.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "alpha_pattern": ({}, None),
    # Changes that hold behind certain tokens only.
    "alora_invocation_tokens": (None,),
    # The others change the weights of the model before the training.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "init_weights": (True, False, None, "bat", "mini"),
}


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA's ``alpha``, divided by the rank, or ``by_root`` by its root; MiSS's ``mini_rank``."""

    alpha: float | None = None
    by_root: bool = False
    mini_rank: int | None = None


def read_adapter_config(path: Path) -> AdapterConfig:
    """What the file says.

    Raises `CheckpointError` that names the file and the field, and `ConfigError`.
    """
    values = read_json(path)
    kind = values.get("peft_type")
    if kind not in ("LORA", "MISS", "BONE"):
        raise CheckpointError(f"{path}: peft_type {kind!r:.80} is not supported, only LORA or MISS")
    for field, supported in _SUPPORTED.items():
        value = values.get(field, supported[0])
        if not any(type(value) is type(each) and value == each for each in supported):
            raise CheckpointError(f"{path}: {field} {value!r:.80} is not supported")
    alpha = _positive(path, values, "lora_alpha") if kind == "LORA" else None
    mini_rank = values.get("mini_r") if values.get("init_weights") == "mini" else None
    if values.get("init_weights") == "mini" and (type(mini_rank) is not int or mini_rank < 1):
        raise CheckpointError(f"{path}: mini_r must be a positive integer, not {mini_rank!r:.80}")
    return AdapterConfig(alpha, values.get("use_rslora") is True, mini_rank)


def _positive(path: Path, values: dict[str, Any], field: str) -> float:
    value = values.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise CheckpointError(f"{path}: {field} must be a positive number, not {value!r:.80}")
    return float(value)
