"""What a conversion makes, in a file: far parts and updates over a base that is named by its hash.

safetensors; the metadata ``linearize`` is JSON: ``base`` (SHA-256 of the GGUF file), ``plan``,
``ranks``, ``lora_scale``, and what the maker wants to say (``notes``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.convert.linearize.network import Llama
from model.convert.linearize.plan import Plan, plan_from_json
from model.convert.linearize.student import LORA_SCALE, Student
from model.weights import CheckpointError

KEY = "linearize"


@dataclass(frozen=True)
class Adapter:
    """Weights by the names of `Student`'s parameters, and what they belong to."""

    base: str
    plan: Plan
    ranks: dict[str, int]
    weights: dict[str, Tensor]
    notes: dict[str, Any]

    def student(self, source: Llama) -> Student:
        """The model over ``source``."""
        student = Student(source, self.plan, self.ranks)
        student.load_state_dict({name: tensor.float() for name, tensor in self.weights.items()})
        return student


def save_adapter(path: Path, adapter: Adapter, dtype: torch.dtype = torch.float32) -> None:
    """Replaces the file ``path``, with weights in ``dtype``."""
    values = {
        "base": adapter.base,
        "plan": adapter.plan.to_json(),
        "ranks": adapter.ranks,
        "lora_scale": LORA_SCALE,
        "notes": adapter.notes,
    }
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in adapter.weights.items()}
    partial = path.with_suffix(".partial")
    save_file(weights, partial, {KEY: json.dumps(values)})
    partial.replace(path)


def load_adapter(path: Path) -> Adapter:
    """Raises `CheckpointError` where ``path`` is no adapter."""
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get(KEY)
        if text is None:
            raise CheckpointError(f"{path.name} is not an adapter: it has no metadata {KEY!r}")
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    values = json.loads(text)
    if values["lora_scale"] != LORA_SCALE:
        raise CheckpointError(
            f"{path.name} has lora_scale {values['lora_scale']}, not {LORA_SCALE}"
        )
    plan = plan_from_json(values["plan"])
    return Adapter(values["base"], plan, values["ranks"], weights, values["notes"])
