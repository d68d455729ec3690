"""A run of a stage: its parameters between two steps, kept in a folder, and how far it is."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor, nn

from model.training.errors import TrainingError
from model.training.resume import load_progress, write_progress

# -------------------------------------------------------------------------------------------------
# A run of `match` or `distil`: its parameters between two steps, kept in a folder.
#
# The folder has ``progress`` (`model.training.resume`), from which a run continues with the same
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
            for field, value in values.items():
                tensors[f"optimizer.{names[id(parameter)]}.{field}"] = value
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
