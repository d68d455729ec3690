"""From single runs to competitors (the seeds of one mechanism at size small), and their plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.studies.mechanisms.quality import WINDOW

Run = dict[str, Any]
#: The questions of `benchmarks.studies.mechanisms.plan` whose runs have one recipe and size.
COMPARED = ("parts", "maps")


@dataclass(frozen=True)
class Competitor:
    """One mechanism. ``speed`` is the figures of ``speed``, where it was measured."""

    name: str
    runs: tuple[Run, ...]
    speed: Run | None

    def values(self) -> list[float]:
        """Bits per byte of each seed, in windows of the validation text."""
        return [run["quality"]["valid"]["bits_per_byte"]["windows"] for run in self.runs]

    def bits_per_byte(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.values())

    @property
    def session_bytes(self) -> int:
        """The state of a session; of a cache, that of one window."""
        run = self.runs[0]
        return int(run.get("state_bytes") or run["cache_bytes_per_token"] * WINDOW)

    @property
    def constant(self) -> bool:
        return "state_bytes" in self.runs[0]


def of_question(runs: list[Run], *questions: str) -> list[Run]:
    """Those whose names begin with one of ``questions``."""
    return [run for run in runs if run["name"].partition("-")[0] in questions]


def competitors(runs: list[Run]) -> list[Competitor]:
    """All mechanisms that were trained by the common recipe, the fewest bits per byte first.

    Raises `ValueError` where two runs were not made by the same recipe.
    """
    groups: dict[str, list[Run]] = {}
    for run in of_question(runs, *COMPARED):
        groups.setdefault(run["mechanism"], []).append(run)
    _check_same_recipe([run for group in groups.values() for run in group])
    speeds = {run["mechanism"]: run for run in runs if run["kind"] == "speed"}
    found = [Competitor(name, tuple(group), speeds.get(name)) for name, group in groups.items()]
    return sorted(found, key=Competitor.bits_per_byte)


def seed_deviation(rows: Iterable[Sequence[float]]) -> float:
    """The standard deviation of one seed, pooled over the rows that have several; 0 without any."""
    several = [row for row in rows if len(row) > 1]
    freedom = sum(len(row) - 1 for row in several)
    squares = sum(statistics.variance(row) * (len(row) - 1) for row in several)
    return math.sqrt(squares / freedom) if freedom else 0.0


def _check_same_recipe(runs: list[Run]) -> None:
    """All runs have the first one's recipe and texts."""
    for run in runs[1:]:
        ours, theirs = _fixed(run), _fixed(runs[0])
        changed = [n for n in sorted(ours.keys() | theirs.keys()) if ours.get(n) != theirs.get(n)]
        if changed:
            raise ValueError(f"{run['name']} and {runs[0]['name']} differ in {', '.join(changed)}")


def _fixed(run: Run) -> Run:
    """What must be equal; the device changes no more than how sums are rounded."""
    recipe = {name: value for name, value in run["recipe"].items() if name != "device"}
    digests = {text: run["quality"][text]["digest"] for text in ("valid", "out_of_domain")}
    return {**recipe, **digests}


def plot(entries: list[Competitor], folder: Path) -> None:
    """Writes ``quality-bytes.png``: the best corner is at the bottom."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes: Any = figure.subplots()
    label = f"bytes of state per session (ring: a 16-bit cache of {WINDOW} tokens, and growing)"
    axes.set(xscale="log", xlabel=label, ylabel="bits per byte, validation, windows of 512")
    for entry in entries:
        colour = "tab:blue" if entry.constant else "tab:orange"
        point = (entry.session_bytes, entry.bits_per_byte())
        face = colour if entry.constant else "none"
        axes.plot(*point, "o", color=colour, markerfacecolor=face)
        axes.annotate(entry.name, point, (5, 3), textcoords="offset points", fontsize=7)
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)
    figure.savefig(folder / "quality-bytes.png", dpi=120)
