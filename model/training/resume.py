"""What an interrupted run needs to continue bit for bit, and its end between two steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.architectures.network import ModelState, Network

# -------------------------------------------------------------------------------------------------
# What an interrupted run needs to continue bit for bit, in safetensors and JSON.
#
# A folder is written next to the old one and renamed over it, so that a kill at
# any moment leaves one whole state.


def save_progress(
    folder: Path,
    model: Network,
    optimizers: list[torch.optim.Optimizer],
    state: ModelState,
    progress: dict[str, Any],
) -> None:
    """Replaces ``folder``. ``progress`` is JSON: step, tokens, seconds, best, configuration."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for i, optimizer in enumerate(optimizers):
        for key, values in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{key}.{name}": value for name, value in values.items()}
    for layer, parts in enumerate(state):
        tensors |= {f"state.{layer}.{name}": part for name, part in parts.items()}
    write_progress(folder, tensors, progress)


def write_progress(folder: Path, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
    """Replaces ``folder`` by one with these tensors and JSON values; `load_progress` reads it."""
    partial, old = folder.with_suffix(".partial"), folder.with_suffix(".old")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, partial / "tensors.safetensors")
    (partial / "progress.json").write_text(json.dumps(progress, indent=2), encoding="utf-8")
    shutil.copymode(partial / "progress.json", partial / "tensors.safetensors")
    if folder.exists():
        # Only now may the older one go: until here a kill may have left nothing else.
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_progress(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The last complete state, or None."""
    for candidate in (folder, folder.with_suffix(".old")):
        if (candidate / "progress.json").is_file():
            progress = json.loads((candidate / "progress.json").read_text(encoding="utf-8"))
            return load_file(candidate / "tensors.safetensors"), progress
    return None


def restore(
    tensors: dict[str, Tensor],
    model: Network,
    optimizers: list[torch.optim.Optimizer],
    state: ModelState,
) -> ModelState:
    """Puts the tensors back into model and optimisers; returns the carried state."""
    device = model.head_weight.device
    model.load_state_dict(_below(tensors, "model."))
    for i, optimizer in enumerate(optimizers):
        values: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _below(tensors, f"optimizer.{i}.").items():
            key, _, field = name.partition(".")
            values.setdefault(int(key), {})[field] = tensor
        optimizer.load_state_dict({**optimizer.state_dict(), "state": values})
    return tuple(
        {name: tensors[f"state.{layer}.{name}"].to(device) for name in parts}
        for layer, parts in enumerate(state)
    )


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


# -------------------------------------------------------------------------------------------------
# Ending a run between two steps instead of inside one.


@contextmanager
def signals_remembered() -> Iterator[Callable[[], bool]]:
    """Gives whether SIGINT or SIGTERM has come; a second one acts as it did before."""
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def remember(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, remember)
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
