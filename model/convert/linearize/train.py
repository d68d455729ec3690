"""The scan of the layers, and the two stages of training, whose steps are functions of a number.

A run keeps its parameters between two steps in a folder, and shows how far it is.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.nn import functional as F

from model.convert.linearize.plan import window_plan
from model.convert.linearize.sequences import Sequences
from model.convert.linearize.source import Llama, full_attention, merged, rotated
from model.convert.linearize.student import Student
from model.files import read_json
from model.training import TrainingError
from model.training.loop import load_progress, write_progress

# -------------------------------------------------------------------------------------------------
# A run of `match` or `distil`: its parameters between two steps, kept in a folder.
#
# The folder has ``progress`` (`model.training.loop`), from which a run continues with the same
# bits, and ``log.jsonl``, an object for each step and each measurement. ``adapter.safetensors`` has
# the averaged weights for use (`model.convert.linearize.result`).


BETAS = (0.9, 0.98)
#: The average of the weights over about the last 1 / (1 - it) steps.
AVERAGE_DECAY = 0.98


class Run:
    """Trained parameters by name, their optimiser and average, and the number of steps done."""

    def __init__(
        self,
        folder: Path,
        parameters: dict[str, nn.Parameter],
        rates: dict[str, float],
        identity: dict[str, Any],
    ) -> None:
        """``rates`` has each parameter's peak learning rate; ``identity`` says which run it is.

        Raises `TrainingError` where ``folder`` holds another run.
        """
        self.folder, self.parameters, self._identity = folder, parameters, identity
        folder.mkdir(parents=True, exist_ok=True)
        groups = [
            {"params": [p for name, p in parameters.items() if rates[name] == rate], "peak": rate}
            for rate in sorted(set(rates.values()))
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=BETAS, weight_decay=0.0, foreach=True
        )
        self._order = [p for group in groups for p in group["params"]]  # type: ignore[attr-defined]
        self.average = {name: p.detach().clone() for name, p in parameters.items()}
        self.step, self.num_tokens, self.seconds = 0, 0, 0.0
        self._started = time.monotonic()
        self._resume()

    def update(self, factor: float, clip: float, num_tokens: int) -> float:
        """One step of the optimiser with rates of ``factor`` times their peaks.

        Returns the norm of the gradient. Raises `TrainingError` where it is not finite; the weights
        are as before then.
        """
        norm = float(nn.utils.clip_grad_norm_(self._order, clip))
        if not math.isfinite(norm):
            raise TrainingError(f"the norm of the gradient is {norm} at step {self.step}")
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.num_tokens += num_tokens
        decay = min(AVERAGE_DECAY, self.step / (self.step + 10.0))
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self.average[name].lerp_(parameter, 1.0 - decay)
        return norm

    def with_average(self, measure: Callable[[], Any]) -> Any:
        """What ``measure`` gives with the averaged weights in the place of the current ones."""
        current = {name: p.detach().clone() for name, p in self.parameters.items()}
        _set(self.parameters, self.average)
        try:
            return measure()
        finally:
            _set(self.parameters, current)

    def log(self, **values: Any) -> None:
        """Adds a line to the log."""
        line = {"step": self.step, "tokens": self.num_tokens, "seconds": round(self.elapsed, 1)}
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **values}) + "\n")

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, without the time between its processes."""
        return self.seconds + time.monotonic() - self._started

    def save(self) -> None:
        """Everything that the next process needs."""
        tensors: dict[str, Tensor] = {f"model.{n}": p.detach() for n, p in self.parameters.items()}
        tensors |= {f"average.{name}": tensor for name, tensor in self.average.items()}
        names = {id(p): name for name, p in self.parameters.items()}
        for parameter, values in self.optimizer.state.items():
            for key, value in values.items():
                tensors[f"optimizer.{names[id(parameter)]}.{key}"] = value
        progress = {
            "step": self.step,
            "tokens": self.num_tokens,
            "seconds": self.elapsed,
            "identity": self._identity,
        }
        write_progress(self.folder / "progress", tensors, progress)

    def _resume(self) -> None:
        loaded = load_progress(self.folder / "progress")
        if loaded is None:
            return
        tensors, progress = loaded
        if progress["identity"] != self._identity:
            raise TrainingError(f"{self.folder} holds another run: {progress['identity']}")
        _set(self.parameters, {name: tensors[f"model.{name}"] for name in self.parameters})
        _set(self.average, {name: tensors[f"average.{name}"] for name in self.parameters})
        for name, parameter in self.parameters.items():
            prefix = f"optimizer.{name}."
            self.optimizer.state[parameter] = {
                key.removeprefix(prefix): value if key.endswith(".step") else value.to(parameter)
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
        self.step, self.num_tokens = progress["step"], progress["tokens"]
        self.seconds = progress["seconds"]


def initialize(parameters: dict[str, nn.Parameter], weights: dict[str, Tensor]) -> Iterable[str]:
    """Sets what ``weights`` has by name and shape; gives the names that it lacks."""
    fit = {
        name: weights[name]
        for name, parameter in parameters.items()
        if name in weights and weights[name].shape == parameter.shape
    }
    _set({name: parameters[name] for name in fit}, fit)
    return parameters.keys() - fit.keys()


@torch.no_grad()
def _set(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


# -------------------------------------------------------------------------------------------------
# How far a stage is: a bar on a terminal, else a line now and then.


#: Seconds between two lines where there is no terminal.
LINE_EVERY_S = 30.0


class Meter:
    """One stage, of ``total`` tokens or layers, of which ``done`` were done before.

    The time left follows from the rate since then: a step may take longer than the seconds over
    which rich measures a speed, and what an earlier run did says nothing of this one.
    """

    def __init__(
        self,
        stage: str,
        total: int,
        done: int,
        unit: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage, self._total, self._first, self._unit = stage, total, done, unit
        self._clock = clock
        self._started = self._shown = clock()
        self._bar = Progress(
            TextColumn(f"{stage} {{task.completed:,.0f}}/{{task.total:,.0f}} {unit}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[left]}"),
            disable=not sys.stdout.isatty(),
        )
        self._task = self._bar.add_task("", total=total, completed=done, left="")
        self._done, self._text = done, ""

    def update(self, done: int, text: str | None = None) -> None:
        """So many are done; ``text`` says how good it is, until there is another."""
        now = self._clock()
        self._done, self._text = done, self._text if text is None else text
        rate = (done - self._first) / max(now - self._started, 1e-9)
        shown = self._text
        if self._unit == "tokens":
            shown = f"{shown}  {rate:,.0f} tokens/s".strip()
        left = ""
        if rate > 0:
            left = f"{timedelta(seconds=round(max(0, self._total - done) / rate))} left"
        self._bar.update(self._task, completed=min(done, self._total), description=shown, left=left)
        if self._bar.disable and now - self._shown > LINE_EVERY_S:
            self._line(f"{shown}  {left}")
            self._shown = now

    def _line(self, text: str) -> None:
        print(f"{self._stage} {self._done:,}/{self._total:,} {self._unit}  {text}", flush=True)


@contextmanager
def metered(
    stage: str,
    total: int,
    done: int,
    unit: str = "tokens",
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Meter]:
    """Shows a stage while it lasts, and its end as a line."""
    meter = Meter(stage, total, done, unit, clock)
    with meter._bar:
        yield meter
    if meter._bar.disable:
        meter._line(meter._text)


# -------------------------------------------------------------------------------------------------
# The first stage: each layer's far part learns to give what the source's attention gives.
#
# All layers at once and each on its own: the input of a layer is the source's, so that a step costs
# one forward pass of the source and those of the far parts. The error of a layer is
#
#     |(o - o_source) W_out|^2 / |o_source W_out|^2  over the tokens that the window does not reach


def match_layers(
    student: Student, ids: Tensor, max_ring: int | None = None, share: float = 1.0
) -> dict[int, float]:
    """Adds ``share`` times the gradients of all layers' errors on texts [B, T] to the far parts.

    ``max_ring`` is that of `Student.hidden`. Returns ``share`` times the errors by layer; a far
    part that no token reaches has none.
    """
    source, errors = student.source, {}
    x = source.embedded(ids)
    for index in range(source.shape.num_layers):
        layer = source.layer(index)
        with torch.no_grad():
            normed = source.attention_input(index, x)
            q, k, v = source.heads(index, F.linear(normed, layer.qkv))
            wanted = merged(full_attention(*rotated(q, k, source.shape), v))
            output = F.linear(wanted, layer.out)
        window = student.window(index, max_ring) + student.plan.sinks
        if student.far(index) is not None and ids.shape[1] > window:
            found = merged(student.attention(index, q, k, v, max_ring))
            missing = F.linear((found - wanted)[:, window:], layer.out)
            size = output[:, window:].float().square().sum()
            error = share * missing.float().square().sum() / size
            with torch.autocast(ids.device.type, enabled=False):
                error.backward()
            errors[index] = error.item()
        with torch.no_grad():
            x = source.after_mlp(index, x + output)
    return errors


# -------------------------------------------------------------------------------------------------
# The loss of distillation, without ever holding all logits.
#
#     KL(t || s) = sum_c t_c (log t_c - log s_c)
#
# for each token, over the ids of ``head``, where t is the softmax of the source's logits and s that
# of the student's. Where the right next token is known to matter (an answer of a recall task), the
# target is a mixture with it: (1 - h) t + h onehot(label). Logits exist for `ROWS` tokens at a
# time, in the forward pass alone, as in `model.training.passes`.


ROWS = 256
#: On a CUDA device, whose memory has room for them.
CUDA_ROWS = 8192
#: A label that is not among the ids of the head.
NO_LABEL = -1


def divergence(
    student: Tensor, source: Tensor, head: Tensor, labels: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean loss over N tokens and, without a gradient, the mean KL to the source, in nats.

    ``student``, ``source`` [N, D] are the inputs of ``head`` [ids, D]. ``labels`` [N] int64 are
    rows of the head or `NO_LABEL`, ``shares`` [N] are h. The loss of a token is (1 - h) times its
    KL and h times -log s of its label.
    """
    shares = shares * (labels != NO_LABEL)
    loss, kl = _Divergence.apply(student, source, head, labels, shares)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss), cast(Tensor, kl)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, source: Tensor, head: Tensor, labels: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        grad = torch.empty_like(student)
        loss = torch.zeros((), dtype=torch.float64, device=student.device)
        kl = torch.zeros_like(loss)
        rows = CUDA_ROWS if student.is_cuda else ROWS
        for start in range(0, len(student), rows):
            part = slice(start, start + rows)
            log_t = (source[part] @ head.t()).log_softmax(dim=-1)
            log_s = (student[part] @ head.t()).log_softmax(dim=-1)
            target = log_t.exp()
            each = (target * (log_t - log_s)).sum(dim=-1)
            share, label = shares[part].unsqueeze(1), labels[part].clamp_min(0).unsqueeze(1)
            nll = -log_s.gather(1, label)
            loss += ((1 - share) * each.unsqueeze(1) + share * nll).sum()
            kl += each.sum()
            target = target.mul_(1 - share).scatter_add_(1, label, share.to(target.dtype))
            grad[part] = log_s.exp_().sub_(target) @ head
        ctx.save_for_backward(grad / len(student))
        mean_kl = (kl / len(student)).float()
        ctx.mark_non_differentiable(mean_kl)
        return (loss / len(student)).float(), mean_kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grads[0], None, None, None, None


@dataclass(frozen=True)
class Choice:
    """One of several values, each with its share; the shares add up to 1."""

    values: tuple[int, ...]
    shares: tuple[float, ...]

    def draw(self, rng: np.random.Generator) -> int:
        """One of the values."""
        return self.values[int(rng.choice(len(self.values), p=self.shares))]


@dataclass(frozen=True)
class Schedule:
    """Rates rise over ``warmup`` steps, stay, and fall over the last ``decay`` of ``steps``."""

    steps: int
    warmup: int = 10
    decay: int = 0

    def factor(self, step: int) -> float:
        """That of step number ``step``, from 0; the last is above 0."""
        rise = min(1.0, (step + 1) / self.warmup)
        left = (self.steps - step) / (self.decay + 1)
        return rise * max(0.0, min(1.0, left))


@dataclass(frozen=True)
class Options:
    """What decides a step besides its number and the data."""

    seed: int = 0
    #: Sequences of a step.
    batch_size: int = 1
    #: Tokens of a step's sequences, and what it cuts rings to, 0 for nothing.
    lengths: Choice = field(default=Choice((1024,), (1.0,)))
    rings: Choice = field(default=Choice((0,), (1.0,)))
    #: Of the norm of the gradient.
    clip: float = 1.0
    #: How much of the target at the answer of a recall task is the answer itself.
    label_share: float = 0.5


@dataclass(frozen=True)
class Head:
    """The rows of the embedding that the loss is over: ``ids`` in ascending order."""

    ids: Tensor
    weight: Tensor

    def labels(self, ids: Tensor) -> Tensor:
        """The row of each id, or `NO_LABEL`."""
        rows = torch.searchsorted(self.ids, ids.contiguous()).clamp_max(len(self.ids) - 1)
        return torch.where(self.ids[rows] == ids, rows, NO_LABEL)


@dataclass(frozen=True)
class Batch:
    """``ids`` [B, T], and of the token after each ``labels`` and ``marked`` (bool) [B, T]."""

    ids: Tensor
    labels: Tensor
    marked: Tensor
    max_ring: int | None


@dataclass(frozen=True)
class Trainer:
    """What steps are made with. ``rows`` are computed at a time, of a batch's."""

    student: Student
    run: Run
    sequences: Sequences
    options: Options
    schedule: Schedule
    device: torch.device
    precision: torch.dtype = torch.float32
    rows: int = 1
    #: Tokens that the source sees at most; 0 is no bound.
    past: int = 0
    #: Longer sequences are computed again in the backward pass, for memory; 0 is no bound.
    longest_kept: int = 0

    def match_step(self) -> None:
        """One step of the first stage."""
        batch = self._batch()
        parts = batch.ids.split(self.rows)
        errors: dict[int, float] = {}
        for ids in parts:
            with self._autocast():
                found = match_layers(self.student, ids, batch.max_ring, len(ids) / len(batch.ids))
            errors = {index: errors.get(index, 0.0) + error for index, error in found.items()}
        mean = sum(errors.values()) / max(1, len(errors))
        rounded = {index: round(error, 4) for index, error in errors.items()}
        self._update(batch, error=mean, errors=rounded)

    def distil_step(self, head: Head) -> None:
        """One step of the second stage."""
        batch, total = self._batch(), 0.0
        labels = head.labels(batch.labels)
        for start in range(0, len(batch.ids), self.rows):
            part = slice(start, start + self.rows)
            ids = batch.ids[part]
            again = 0 < self.longest_kept < ids.shape[1]
            with self._autocast():
                loss, kl = divergence(
                    self.student.hidden(ids, batch.max_ring, recompute=again).flatten(0, 1),
                    self.student.source.hidden(ids, self.past).flatten(0, 1),
                    head.weight,
                    labels[part].flatten(),
                    batch.marked[part].flatten() * self.options.label_share,
                )
            share = len(ids) / len(batch.ids)
            (loss * share).backward()
            total += float(kl) * share
        self._update(batch, kl=total)

    def _update(self, batch: Batch, **values: Any) -> None:
        factor = self.schedule.factor(self.run.step)
        norm = self.run.update(factor, self.options.clip, batch.ids.numel())
        sizes = {"length": batch.ids.shape[1], "ring": batch.max_ring}
        self.run.log(**values, norm=round(norm, 4), factor=round(factor, 4), **sizes)

    def _batch(self) -> Batch:
        """That of the run's step."""
        step, options = self.run.step, self.options
        rng = np.random.default_rng([options.seed, step, 1 << 20])
        length, ring = options.lengths.draw(rng), options.rings.draw(rng)
        rows = [self.sequences.draw(step, row, length) for row in range(options.batch_size)]
        ids = torch.stack([row.ids for row in rows]).to(self.device)
        marked = torch.stack([row.marked for row in rows]).to(self.device)
        return Batch(ids[:, :-1], ids[:, 1:], marked[:, 1:], ring or None)

    def _autocast(self) -> torch.autocast:
        low = self.precision != torch.float32
        return torch.autocast(self.device.type, self.precision, enabled=low)


# -------------------------------------------------------------------------------------------------
# Before the stages: the KL to the source with one layer's window at a time, which shows the layers
# that need their whole past (`model.convert.linearize.plan.choose_plan`).


#: Of the layer whose window is tried, in tokens.
SCAN_WINDOW = 60


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
