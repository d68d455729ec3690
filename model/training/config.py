"""The options of a training run, and whether two runs are the same one."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.architectures import Config
from model.checkpoint import load_checkpoint
from model.tokenizer import Tokenizer
from model.training import TrainingError
from model.training.data import Source


@dataclass(frozen=True)
class TrainConfig:
    """One run. Everything that decides the weights is here and in the model's `Config`."""

    data: tuple[Source, ...]
    out: Path
    final_data: tuple[Source, ...] = ()
    valid: tuple[Path, ...] = ()
    initial: Path | None = None
    num_steps: int = 2000
    batch_size: int = 16
    window: int = 512
    stream_windows: int = 16
    optimizer: str = "muon"
    learning_rate: float = 8e-3
    embedding_learning_rate: float | None = None
    weight_decay: float = 0.1
    dropout: float = 0.0
    warmup_steps: int = 100
    decay: float = 0.5
    clip: float = 1.0
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    compile_layers: bool = False
    threads: int | None = None
    eval_every: int = 250
    save_every_s: float = 120.0
    sample_every: int = 1000
    stop_at_step: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise TrainingError(
                    f"{name} must be {' or '.join(known)}, not {getattr(self, name)!r}"
                )
        for name in ("learning_rate", "embedding_learning_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise TrainingError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("weight_decay", "warmup_steps", "save_every_s", "seed"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise TrainingError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not 0.0 <= self.dropout < 1.0:
            raise TrainingError(f"dropout must be in [0, 1), not {self.dropout}")
        if not 0.0 <= self.decay <= 1.0:
            raise TrainingError(f"decay must be in [0, 1], not {self.decay}")

    @property
    def decay_steps(self) -> int:
        """The last steps, over which the learning rate falls to 0."""
        return round(self.decay * (self.num_steps - min(self.warmup_steps, self.num_steps)))


_COUNTS = ("num_steps", "batch_size", "window", "stream_windows", "eval_every", "sample_every")
_CHOICES = {
    "optimizer": ("muon", "adamw"),
    "device": ("auto", "cpu", "cuda"),
    "precision": ("auto", "float32", "bfloat16"),
}

#: What may differ between a run and its continuation without changing any weight.
_INDIFFERENT = {"out", "eval_every", "save_every_s", "sample_every", "stop_at_step", "threads"}

#: What may differ until the learning rate begins to fall.
_PLAN = ("num_steps", "decay", "final_data")


def identity(config: TrainConfig, model: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides the weights of a run, for JSON: a run continues only where it is the same."""
    run = {k: v for k, v in dataclasses.asdict(config).items() if k not in _INDIFFERENT}
    for name in ("data", "final_data"):
        run[name] = [[source.path.name, source.weight] for source in getattr(config, name)]
    run["valid"] = [path.name for path in config.valid]
    run["initial"] = None if config.initial is None else load_checkpoint(config.initial).digest
    run["decays_from"] = config.num_steps - config.decay_steps
    values = {**run, "model": model.to_dict(), "tokenizer": tokenizer.digest}
    found: dict[str, Any] = json.loads(json.dumps(values))  # lists where a config has tuples
    return found


def changes(before: dict[str, Any], now: dict[str, Any], step: int) -> list[str]:
    """The options that make ``now`` another run than ``before``, which was saved at ``step``."""
    rate = "embedding_learning_rate"  # that of the matrices where a run names none
    if before.get(rate) is None and now[rate] == before["learning_rate"]:
        before = {**before, rate: now[rate]}
    before = {"dropout": 0.0, "compile_layers": False, **before}  # a run of before there were any
    changed = {name for name in now | before if now.get(name) != before.get(name)}
    if step <= min(now["decays_from"], before.get("decays_from", 0)):
        changed -= {*_PLAN, "decays_from"}
    return sorted(changed)
