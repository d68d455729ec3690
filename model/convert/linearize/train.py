"""The two stages of training: what a step does is a function of its number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.convert.linearize.divergence import NO_LABEL, divergence
from model.convert.linearize.match import match_layers
from model.convert.linearize.run import Run
from model.convert.linearize.sequences import Sequences
from model.convert.linearize.student import Student


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
            with self._autocast():
                loss, kl = divergence(
                    self.student.hidden(ids, batch.max_ring).flatten(0, 1),
                    self.student.source.hidden(ids).flatten(0, 1),
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
