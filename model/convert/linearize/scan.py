"""Which layers need their whole past: the KL to the source with one layer's window at a time.

The layers with the largest KL get rings, which are windows as long as the bytes allow, with a delta
far part. Of the others the half with the larger KL gets a relative far part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from model.architectures.hybrid import SINKS
from model.convert.linearize.plan import LlamaShape, Plan, plan_from_json, smollm2_plan, window_plan
from model.convert.linearize.source import Llama
from model.convert.linearize.student import Student
from model.convert.linearize.train import NO_LABEL, divergence
from model.families.llama.config import LayerPlan, read_plans
from model.files import ConfigError, read_json
from model.tensor_spec import POSITION_BLOCK

#: Of the layer whose window is tried, in tokens.
SCAN_WINDOW = 60
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


def scanned(file: Path) -> list[float]:
    """The KL of the layers that an earlier call of `scan_layers` has found."""
    found: list[float] = read_json(file)["kl"] if file.is_file() else []
    return found


@torch.no_grad()
def scan_layers(
    source: Llama,
    ids: Tensor,
    head: Tensor,
    file: Path,
    stop: Callable[[], bool],
    progress: Callable[[int], None],
) -> list[float] | None:
    """The KL of each layer on texts ``ids`` [B, T], over the ids of ``head``, in nats per token.

    ``file`` keeps those that are found, and gives those of an earlier call. None where it was
    stopped.
    """
    student = Student(source, window_plan(source.shape.num_layers, SCAN_WINDOW), {})
    found = scanned(file)
    inputs = [source.embedded(ids)]
    for index in range(source.shape.num_layers):
        inputs.append(source.after_layer(index, inputs[-1]))
    wanted = source.final_norm(inputs[-1]).flatten(0, 1)
    labels = torch.full((len(wanted),), NO_LABEL, device=ids.device)
    for layer in range(len(found), source.shape.num_layers):
        if stop():
            return None
        x = student.after_layer(layer, inputs[layer])
        for index in range(layer + 1, source.shape.num_layers):
            x = source.after_layer(index, x)
        _, kl = divergence(
            source.final_norm(x).flatten(0, 1), wanted, head, labels, torch.zeros_like(labels)
        )
        found.append(float(kl))
        values = {"window": SCAN_WINDOW, "tokens": ids.numel(), "kl": found}
        file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        progress(len(found))
    return found


def choose_plan(kl: list[float], shape: LlamaShape, max_bytes: int) -> Plan:
    """The plan of at most ``max_bytes`` from the KL of each layer. Raises `ConfigError`.

    Half of the bytes at most are for windows that all layers have, the rest for rings.
    """
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
        windows = range(MIN_WINDOW, MAX_RING + 1, POSITION_BLOCK)
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
        and ring == MAX_RING
        and plan(window, rings + 1, ring).state_bytes(shape) <= max_bytes
    ):
        rings += 1
    return plan(window, rings, ring)


def equal_window(plan: Plan, shape: LlamaShape) -> Plan:
    """The control: windows alone, the shortest whose state is not smaller than that of ``plan``."""
    per_token = window_plan(shape.num_layers, 1).state_bytes(shape) // (1 + SINKS)
    return window_plan(shape.num_layers, -(-plan.state_bytes(shape) // per_token) - SINKS)
