"""How far a stage is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.progress import BarColumn, Progress, TextColumn

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
