"""The training loop: one process, resumable at any moment, bit for bit.

Mechanisms with a constant state are trained on streams whose state is carried
from window to window (truncated backpropagation through time, the state
detached), because that is how they are served; a row starts from the empty
state with ``reset_probability``. The softmax baseline starts every window from
scratch, and reads the same tokens in the same order.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.attention import spec_of
from model.checkpoint import save_checkpoint
from model.config import ModelConfig
from model.lm import LanguageModel, ModelState
from model.tokenizer import Tokenizer
from model.training.data import StreamBatches, tokenize_files
from model.training.evaluate import evaluate
from model.training.loss import linear_cross_entropy
from model.training.optimizer import learning_rate_factor, make_optimizers
from model.training.report import Report
from model.training.resume import load_progress, restore, save_progress
from model.training.sample import sample_text
from model.training.signals import signals_remembered

#: Bytes of each validation document that an evaluation during training scores.
VALID_BYTES = 100_000


class TrainingError(RuntimeError):
    """A run that cannot go on: the loss is not finite, or the folder holds another run."""


@dataclass(frozen=True)
class TrainConfig:
    """One run. Everything that decides the weights is here and in `ModelConfig`."""

    data: tuple[Path, ...]
    out: Path
    valid: Path | None = None
    num_steps: int = 2000
    batch_size: int = 8
    window: int = 512
    optimizer: str = "muon"
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    clip: float = 1.0
    reset_probability: float = 0.1
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    threads: int | None = None
    eval_every: int = 250
    save_every_s: float = 120.0
    sample_every: int = 1000
    stop_at_step: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "window", "eval_every", "sample_every"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise TrainingError(
                    f"{name} must be {' or '.join(known)}, not {getattr(self, name)!r}"
                )
        for name in ("learning_rate", "clip"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise TrainingError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("weight_decay", "warmup_steps", "save_every_s", "seed"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise TrainingError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not 0.0 <= self.reset_probability <= 1.0:
            raise TrainingError(
                f"reset_probability must be in [0, 1], not {self.reset_probability}"
            )


_CHOICES = {
    "optimizer": ("muon", "adamw"),
    "device": ("auto", "cpu", "cuda"),
    "precision": ("auto", "float32", "bfloat16"),
}

#: What may differ between a run and its continuation without changing any weight.
_INDIFFERENT = {"out", "eval_every", "save_every_s", "sample_every", "stop_at_step", "threads"}


def train(config: TrainConfig, model_config: ModelConfig, tokenizer: Tokenizer) -> Path:
    """Trains, or goes on with the run in ``config.out``; returns the folder of the best model.

    SIGINT and SIGTERM end the run after the current step with its state saved.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    run = Run(config, model_config, tokenizer)
    try:
        with signals_remembered() as stop:
            _loop(run, stop)
    finally:
        run.report.close()
    return config.out / "model"


def _loop(run: Run, stop: Callable[[], bool]) -> None:
    config, last_saved = run.config, time.monotonic()
    last_step = config.num_steps
    if config.stop_at_step is not None:
        last_step = min(last_step, config.stop_at_step)
    while run.step < last_step and not stop():
        run.train_step()
        if run.step % config.sample_every == 0:
            run.report.sample(run.step, sample_text(run.model, run.tokenizer, seed=run.step))
        if run.step % config.eval_every == 0 or run.step == config.num_steps:
            run.evaluate()
        if time.monotonic() - last_saved > config.save_every_s:
            run.save()
            last_saved = time.monotonic()
    run.save()


class Run:
    """A run between two steps: weights, optimisers, carried state, and how far it got."""

    def __init__(
        self, config: TrainConfig, model_config: ModelConfig, tokenizer: Tokenizer
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.device = _device(config.device)
        self.autocast_dtype = _autocast_dtype(config.precision, self.device)
        self.carries_state = spec_of(model_config.attention).constant_state
        tokens = tokenize_files(config.data, tokenizer, config.out / "cache")
        self.batches = StreamBatches(tokens, config.batch_size, config.window, config.seed)
        self.model = LanguageModel(model_config)
        self.model.init_weights(torch.Generator().manual_seed(config.seed))
        self.model.to(self.device)
        self.optimizers = make_optimizers(
            self.model, config.optimizer, config.learning_rate, config.weight_decay
        )
        self.state = self.model.empty_state(config.batch_size)
        self.position = torch.zeros(config.batch_size, dtype=torch.int64, device=self.device)
        self.step, self.seconds, self.best = 0, 0.0, math.inf
        self._resume()
        self.report = Report(config.out, self.step, config.num_steps)

    @property
    def num_tokens(self) -> int:
        return self.step * self.config.batch_size * self.config.window

    def train_step(self) -> None:
        """One batch: forward, backward, clip, update.

        Raises `TrainingError`, the weights untouched, where loss or gradient is not finite.
        """
        started = time.monotonic()
        factor = learning_rate_factor(self.step, self.config.num_steps, self.config.warmup_steps)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = self.config.learning_rate * factor
        loss = self._loss()
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(f"the loss is {value} at step {self.step}")
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip))
        if not math.isfinite(norm):
            raise TrainingError(f"the norm of the gradient is {norm} at step {self.step}")
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        elapsed = time.monotonic() - started
        self.seconds += elapsed
        rate = self.config.batch_size * self.config.window / elapsed
        self.report.step(self.step, self.num_tokens, self.seconds, value, factor, norm, rate)

    def _loss(self) -> Tensor:
        inputs, targets = (t.to(self.device) for t in self.batches.batch(self.step))
        losses: list[Tensor] = []
        with self._autocast():
            if self.carries_state:
                keep = ~self.batches.resets(self.step, self.config.reset_probability)
                state = _masked(self.state, keep.to(self.device))
                position = self.position * keep.to(self.device)
                x, state = self.model.hidden_chunk(inputs, state, position, losses)
                self.position = position + inputs.shape[1]
                self.state = tuple({n: t.detach() for n, t in layer.items()} for layer in state)
            else:
                x = self.model.hidden_parallel(inputs, losses)
        dtype = self.autocast_dtype or torch.float32
        nll = linear_cross_entropy(
            x.float().flatten(0, 1), self.model.head_weight, targets.flatten(), dtype
        )
        return torch.stack([nll, *losses]).sum()

    def evaluate(self) -> None:
        """Bits per byte on the validation text; the best model so far is exported."""
        if self.config.valid is None:
            save_checkpoint(self.config.out / "model", self.model, self.tokenizer)
            return
        self.model.eval()
        with self._autocast():
            result = evaluate(
                self.model,
                self.tokenizer,
                self.config.valid,
                "windows",
                self.config.window,
                VALID_BYTES,
            )
        self.model.train()
        self.report.evaluation(self.step, result.bits_per_byte)
        if result.bits_per_byte < self.best:
            self.best = result.bits_per_byte
            save_checkpoint(self.config.out / "model", self.model, self.tokenizer)

    def save(self) -> None:
        """Everything that the next process needs."""
        self.report.flush()
        progress = {
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best if math.isfinite(self.best) else None,
            "position": self.position.tolist(),
            "identity": self._identity(),
        }
        save_progress(
            self.config.out / "progress", self.model, self.optimizers, self.state, progress
        )

    def _resume(self) -> None:
        loaded = load_progress(self.config.out / "progress")
        if loaded is None:
            return
        tensors, progress = loaded
        changed = [k for k, v in self._identity().items() if progress["identity"].get(k) != v]
        if changed:
            raise TrainingError(
                f"{self.config.out} holds a run with another {', '.join(changed)}:"
                " use the same options, or another --out"
            )
        self.state = restore(tensors, self.model, self.optimizers, self.state)
        self.step, self.seconds = progress["step"], progress["seconds"]
        self.best = math.inf if progress["best"] is None else progress["best"]
        # Runs saved before positions were kept start them at 0, which no mechanism of theirs reads.
        position = progress.get("position", self.position.tolist())
        self.position = torch.tensor(position, dtype=torch.int64, device=self.device)

    def _identity(self) -> dict[str, Any]:
        run = {k: v for k, v in dataclasses.asdict(self.config).items() if k not in _INDIFFERENT}
        run["data"] = [path.name for path in self.config.data]
        run["valid"] = self.config.valid.name if self.config.valid else None
        return {**run, "model": self.model.config.to_dict(), "tokenizer": self.tokenizer.digest}

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)


def _masked(state: ModelState, keep: Tensor) -> ModelState:
    """The state with the rows outside ``keep`` [B] set to zero, which is the empty state."""
    return tuple(
        {n: t * keep.view(-1, *(1,) * (t.dim() - 1)).to(t.dtype) for n, t in layer.items()}
        for layer in state
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainingError("device cuda: this torch finds no CUDA device; use --device cpu")
    return torch.device(name)


def _autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """bfloat16 where the hardware multiplies it natively, else None for float32."""
    if precision == "auto":
        native = (
            torch.cuda.is_bf16_supported(including_emulation=False)
            if device.type == "cuda"
            else torch.cpu._is_avx512_bf16_supported()
        )
        precision = "bfloat16" if native else "float32"
    return {"bfloat16": torch.bfloat16, "float32": None}[precision]
