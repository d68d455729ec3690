"""What a layer of constant state keeps of the past, and the bytes of it.

A layer has a window of exact softmax over the last tokens and the first ``sinks`` tokens of the
text, which many heads rest on (Xiao et al. 2023, "Efficient Streaming Language Models with
Attention Sinks"). What leaves the window is forgotten, or goes into a far part:

- ``relative``: sums of features, weighed against the near sum (`.relative`);
- ``delta``: the gated delta rule (`.delta`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from model.architectures.bounded import SINKS
from model.files import ConfigError
from model.tensor_spec import POSITION_BLOCK, Shape, TensorSpec

Far = Literal["none", "relative", "delta"]
FARS: tuple[Far, ...] = get_args(Far)


@dataclass(frozen=True)
class LayerPlan:
    """One layer: ``window`` last tokens, the far part, and its features per head of keys."""

    window: int
    far: Far = "none"
    features: int = 0

    def __post_init__(self) -> None:
        if type(self.window) is not int or self.window < 1:
            raise ConfigError(f"window must be 1 or more, not {self.window!r}")
        if self.far not in FARS:
            raise ConfigError(f"far must be one of {', '.join(FARS)}, not {self.far!r}")
        features = self.features
        if type(features) is not int or (self.far == "none") != (features == 0):
            raise ConfigError(f"far part {self.far!r} cannot have {features!r} features")
        if features < 0 or features % 2:
            raise ConfigError(f"features must be even and positive, not {features}")

    @property
    def context(self) -> int:
        """Tokens whose keys and values the layer holds: the first ones and the last ones."""
        return self.window + SINKS

    def far_state(self, num_kv_heads: int, head_dim: int) -> dict[str, TensorSpec]:
        """S, and z where there is a sum of the features alone."""
        sums = TensorSpec((num_kv_heads, self.features, head_dim))
        if self.far == "none":
            return {}
        if self.far == "delta":
            return {"S": sums}
        return {"S": sums, "z": TensorSpec((num_kv_heads, self.features))}

    def far_shapes(self, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Shape]:
        """The weights of the far part, by their names in it."""
        if self.far == "none":
            return {}
        half = self.features // 2
        shapes: dict[str, Shape] = {
            "key_map": (num_kv_heads, head_dim, half),
            "query_map": (num_heads, head_dim, half),
            "scale": (num_heads, head_dim),
            "bias": (num_heads,),
        }
        if self.far == "delta":
            shapes |= {"gates": (num_kv_heads, 2 * head_dim, 2), "gate_bias": (num_kv_heads, 2)}
        return shapes


def read_plans(values: Any, num_layers: int) -> tuple[LayerPlan, ...]:
    """Those of a config, where a JSON file has objects: one for each layer, or none.

    Raises `ConfigError`. First tokens and window fill whole blocks of positions.
    """
    if not isinstance(values, list | tuple) or len(values) not in (0, num_layers):
        raise ConfigError(f"windows must be a list of {num_layers} objects or empty")
    return tuple(_read_plan(value) for value in values)


def _read_plan(value: Any) -> LayerPlan:
    if isinstance(value, dict) and value.keys() <= {"window", "far", "features"}:
        value = LayerPlan(**{"window": 0, **value})
    if not isinstance(value, LayerPlan):
        raise ConfigError(f"windows: {value!r:.80} is not of window, far and features")
    if value.context % POSITION_BLOCK:
        raise ConfigError(
            f"windows: a window must be {SINKS} less than a multiple of {POSITION_BLOCK},"
            f" not {value.window}"
        )
    return value
