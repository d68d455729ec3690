"""What all layers keep of the past: the plans of a conversion, named or chosen by bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.architectures.hybrid import PAST_DTYPE, SINKS
from model.families.llama.config import LayerPlan, read_plans
from model.files import ConfigError, read_json
from model.tensor_spec import POSITION_BLOCK


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama: queries share keys and values in groups of heads."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_norm_eps: float
    #: What the frequency of each pair of channels is divided by; none is all one.
    rope_factors: tuple[float, ...] = ()
    #: Whether queries and keys have norms, as in Qwen3.
    qk_norm: bool = False
    #: Whether queries, keys and values have biases, as in Qwen2.
    qkv_bias: bool = False
    #: Whether the head is the embedding.
    tied: bool = True

    @property
    def group(self) -> int:
        """Heads of queries for each head of keys."""
        return self.num_heads // self.num_kv_heads


def state_bytes(layer: LayerPlan, shape: LlamaShape, sinks: int) -> int:
    """Bytes of a session's state in a layer."""
    slots = 2 * (layer.window + sinks) * shape.num_kv_heads * shape.head_dim
    far = layer.far_state(shape.num_kv_heads, shape.head_dim).values()
    return slots * np.dtype(PAST_DTYPE).itemsize + sum(spec.num_bytes for spec in far)


@dataclass(frozen=True)
class Plan:
    """All layers, and how many first tokens each of them keeps."""

    layers: tuple[LayerPlan, ...]
    sinks: int = 4

    def state_bytes(self, shape: LlamaShape) -> int:
        """Bytes of a session's state, at any length of its text."""
        return sum(state_bytes(layer, shape, self.sinks) for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `plan_from_json` reads them."""
        layers = [[layer.window, layer.far, layer.features] for layer in self.layers]
        return {"sinks": self.sinks, "layers": layers}


def plan_from_json(values: dict[str, Any]) -> Plan:
    """The reverse of `Plan.to_json`. Raises `ConfigError`."""
    layers = tuple(LayerPlan(*layer) for layer in values["layers"])
    return Plan(layers, values["sinks"])


@dataclass(frozen=True)
class _Parts:
    """A plan for the 30 layers of SmolLM2-135M by kinds of layer."""

    ring: int  # tokens that the retrieval layers keep
    delta: int  # features of their far part
    relative: dict[int, tuple[int, int]]  # layer: window and features
    windows: dict[int, int]  # of the layers without a far part


#: KL to the source with one layer's window at 64 is two to five times that of any other layer.
_RETRIEVAL = (8, 18, 20, 23)
#: In the other layers a far part of 64 features costs as many bytes as 65 more tokens of window.
#: Only in these seven it lowers the error of the attention's output by more, after training. The
#: windows of the rest are where the sum of each layer's KL to the source is least: 8 tokens at a
#: time to the layer that gains most, the KL at 64 tokens scaled by the output's error at others;
#: then rounded, so that window and first tokens fill whole blocks of positions.
_PARTS = {
    "6mb": _Parts(
        ring=924,
        delta=128,
        relative={3: (60, 128), 5: (60, 128), 10: (60, 128)}
        | dict.fromkeys((4, 6, 7, 9), (124, 64)),
        windows={0: 172, 1: 140, 2: 252, 11: 60, 12: 76, 13: 44, 14: 124, 15: 156, 16: 60, 17: 156}
        | {19: 172, 21: 156, 22: 124, 24: 140, 25: 44, 26: 92, 27: 44, 28: 60, 29: 60},
    ),
    "3mb": _Parts(
        ring=380,
        delta=64,
        relative=dict.fromkeys((3, 4, 5, 6, 7, 9, 10), (28, 64)),
        windows={0: 108, 1: 76, 2: 172, 11: 28, 12: 44, 13: 28, 14: 76, 15: 108, 16: 44, 17: 108}
        | {19: 108, 21: 92, 22: 76, 24: 76, 25: 28, 26: 60, 27: 28, 28: 28, 29: 28},
    ),
}


def smollm2_plan(name: str) -> Plan:
    """The plan ``6mb`` or ``3mb`` of SmolLM2-135M. Raises `ConfigError`."""
    if name not in _PARTS:
        raise ConfigError(f"plan must be one of {', '.join(_PARTS)}, not {name!r}")
    parts = _PARTS[name]
    layers = {index: LayerPlan(parts.ring, "delta", parts.delta) for index in _RETRIEVAL}
    layers |= {i: LayerPlan(window, "relative", m) for i, (window, m) in parts.relative.items()}
    layers |= {index: LayerPlan(window) for index, window in parts.windows.items()}
    return Plan(tuple(layers[index] for index in range(30)))


def window_plan(num_layers: int, window: int, sinks: int = 4) -> Plan:
    """The control: the same window in all layers and no far part."""
    return Plan((LayerPlan(window),) * num_layers, sinks)


# -------------------------------------------------------------------------------------------------
# The plan of a conversion: a named one, or chosen by the KL to the source with one layer's window
# at a time (`model.convert.linearize.train.scan_layers`).
#
# The layers with the largest KL get rings, which are windows as long as the bytes allow, with a
# delta far part. Of the others the half with the larger KL gets a relative far part.

#: The longest and the shortest window of a chosen plan: with the first tokens, whole blocks.
MAX_RING, MIN_WINDOW = 58 * POSITION_BLOCK - SINKS, POSITION_BLOCK - SINKS
DELTA_FEATURES, RELATIVE_FEATURES = 128, 64
#: Of so many layers one is a ring at least.
LAYERS_PER_RING = 8
#: The default of the state: that of a window of so many tokens in all layers.
DEFAULT_WINDOW = 256 - SINKS
_MEGABYTES = re.compile(r"(\d+(?:\.\d+)?)mb", re.IGNORECASE)
#: What `smollm2_plan` is for: layers, width, heads of keys.
_SMOLLM2 = (30, 576, 3)


def given_plan(state: str | None, shape: LlamaShape) -> Plan | None:
    """The plan that ``state`` names, a JSON file or one made for this model; None without one.

    Raises `ConfigError`.
    """
    if state is not None and state.endswith(".json"):
        plan = plan_from_json(read_json(Path(state)))
        if plan.sinks != SINKS:
            raise ConfigError(f"{state}: sinks must be {SINKS}, not {plan.sinks}")
        return Plan(read_plans(plan.layers, shape.num_layers))
    known = (shape.num_layers, shape.hidden_size, shape.num_kv_heads) == _SMOLLM2
    state = (state or "6mb").lower()
    return smollm2_plan(state) if known and state in ("6mb", "3mb") else None


def given_bytes(state: str | None, shape: LlamaShape) -> int:
    """The most bytes of a session's state. Raises `ConfigError`."""
    if state is None:
        return window_plan(shape.num_layers, DEFAULT_WINDOW).state_bytes(shape)
    if not (found := _MEGABYTES.fullmatch(state)):
        raise ConfigError(f"--state must be megabytes such as 6mb, or a .json file, not {state!r}")
    return int(float(found[1]) * 1e6)


def sized_plan(state: str | None, shape: LlamaShape, max_context: int = MAX_RING + SINKS) -> Plan:
    """The plan that is given, or one of the sizes of that which is chosen. Raises `ConfigError`."""
    return given_plan(state, shape) or choose_plan(
        [0.0] * shape.num_layers, shape, given_bytes(state, shape), max_context
    )


def choose_plan(
    kl: list[float], shape: LlamaShape, max_bytes: int, max_context: int = MAX_RING + SINKS
) -> Plan:
    """The plan of at most ``max_bytes`` from the KL of each layer. Raises `ConfigError`.

    Half of the bytes at most are for windows that all layers have, the rest for rings. No layer
    keeps more than ``max_context`` tokens.
    """
    longest_ring = min(MAX_RING, max_context // POSITION_BLOCK * POSITION_BLOCK - SINKS)
    order = sorted(range(len(kl)), key=lambda layer: -kl[layer])
    widest = 2 * shape.head_dim

    def plan(window: int, rings: int = 0, ring: int = 0) -> Plan:
        layers = [LayerPlan(window)] * len(kl)
        others = order[rings:]
        for layer in order[:rings]:
            layers[layer] = LayerPlan(ring, "delta", min(DELTA_FEATURES, widest))
        for layer in others[: len(others) // 2]:
            layers[layer] = LayerPlan(window, "relative", min(RELATIVE_FEATURES, widest))
        return Plan(tuple(layers))

    def longest(fits: Callable[[int], bool]) -> int:
        windows = range(MIN_WINDOW, longest_ring + 1, POSITION_BLOCK)
        return max((window for window in windows if fits(window)), default=0)

    window = longest(lambda w: 2 * plan(w).state_bytes(shape) <= max_bytes)
    if not window:
        least = 2 * plan(MIN_WINDOW).state_bytes(shape)
        raise ConfigError(f"--state must be at least {least / 1e6:.2f}mb for this model")
    rings = -(-len(kl) // LAYERS_PER_RING)
    ring = longest(lambda r: r > window and plan(window, rings, r).state_bytes(shape) <= max_bytes)
    if not ring:
        return plan(window)
    while (
        rings < len(kl)
        and ring == longest_ring
        and plan(window, rings + 1, ring).state_bytes(shape) <= max_bytes
    ):
        rings += 1
    return plan(window, rings, ring)


def equal_window(plan: Plan, shape: LlamaShape) -> Plan:
    """The control: windows alone, the shortest whose state is not smaller than that of ``plan``."""
    per_token = window_plan(shape.num_layers, 1).state_bytes(shape) // (1 + SINKS)
    return window_plan(shape.num_layers, -(-plan.state_bytes(shape) // per_token) - SINKS)
