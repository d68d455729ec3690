"""From the files of single runs to competitors (the seeds of one mechanism and size), and plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.mechanisms.quality import WINDOW

Run = dict[str, Any]
#: The rate that the second plot shows: a cache at its shorter length.
RATES = ("decode_16", f"decode_16_at_{WINDOW}")


@dataclass(frozen=True)
class Competitor:
    """One row of the tables. ``speed`` is the figures of ``speed``, where it was measured."""

    name: str
    size: str
    runs: tuple[Run, ...]
    speed: Run | None

    def bits_per_byte(self, text: str = "valid", way: str = "windows") -> float:
        """The mean over seeds."""
        return statistics.fmean(run["quality"][text]["bits_per_byte"][way] for run in self.runs)

    @property
    def session_bytes(self) -> int:
        """The state of a session; of a cache, that of one window."""
        run = self.runs[0]
        return int(run.get("state_bytes") or run["cache_bytes_per_token"] * WINDOW)

    @property
    def constant(self) -> bool:
        return "state_bytes" in self.runs[0]


def competitors(runs: list[Run]) -> list[Competitor]:
    """All trained mechanisms.

    Raises `ValueError` where two runs of a size were not made by the same recipe.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run["kind"] == "language":
            groups.setdefault((run["size"], run["mechanism"]), []).append(run)
    for size in {size for size, _ in groups}:
        _check_same_recipe([r for r in runs if (r["kind"], r.get("size")) == ("language", size)])
    speeds = {(r["size"], r["mechanism"]): r for r in runs if r["kind"] == "speed"}
    return [
        Competitor(label, size, tuple(group), speeds.get((size, label)))
        for (size, label), group in groups.items()
    ]


def leaderboard(entries: list[Competitor]) -> list[Competitor]:
    """The fewest bits per byte on the validation text first."""
    return sorted(entries, key=Competitor.bits_per_byte)


def difference(entry: Competitor, baseline: Competitor) -> tuple[float, float]:
    """Bits per byte more than the baseline, and the standard error that comes from the text.

    Both are scored on the same windows, so the differences of single windows tell how far
    the mean could be off on another text of this kind. What another seed gives is not in it.
    """
    ours, theirs = (
        np.mean([run["quality"]["valid"]["nats_per_window"] for run in e.runs], axis=0)
        for e in (entry, baseline)
    )
    per_byte = 1 / math.log(2) / entry.runs[0]["quality"]["valid"]["num_bytes"]
    gaps = (ours - theirs) * per_byte
    error = gaps.std(ddof=1) * math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return float(gaps.sum()), float(error)


def bucket_names(entries: list[Competitor]) -> list[str]:
    """The buckets that any of them has, by position."""
    names = {name for e in entries for run in e.runs for name in run["quality"]["valid"]["buckets"]}
    return sorted(names, key=lambda name: int(name.partition("-")[0]))


def recall_rows(runs: list[Run]) -> tuple[list[tuple[str, int, list[float]]], list[str]]:
    """(mechanism, number of seeds, mean accuracies), best first, and the numbers of pairs.

    Raises `ValueError` where two runs were not made by the same recipe.
    """
    of_recall = [run for run in runs if run["kind"] == "recall"]
    _check_same_recipe(of_recall)
    groups: dict[str, list[Run]] = {}
    for run in of_recall:
        groups.setdefault(run["mechanism"], []).append(run)
    pairs = list(next(iter(groups.values()))[0]["accuracy"])
    rows = [
        (name, len(group), [statistics.fmean(r["accuracy"][n] for r in group) for n in pairs])
        for name, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -sum(row[2])), pairs


def _check_same_recipe(runs: list[Run]) -> None:
    """All runs have the first one's recipe and, if they are of language, its texts."""
    for run in runs[1:]:
        ours, theirs = _fixed(run), _fixed(runs[0])
        changed = [n for n in sorted(ours.keys() | theirs.keys()) if ours.get(n) != theirs.get(n)]
        if changed:
            raise ValueError(f"{run['name']} and {runs[0]['name']} differ in {', '.join(changed)}")


def _fixed(run: Run) -> Run:
    """What must be equal."""
    if run["kind"] == "recall":
        # An ignored limit, which runs before its removal have.
        return {name: value for name, value in run["recipe"].items() if name != "max_seconds"}
    digests = {text: run["quality"][text]["digest"] for text in ("valid", "out_of_domain")}
    return {**run["recipe"], **digests}


def plot(entries: list[Competitor], folder: Path) -> None:
    """Writes ``quality-bytes.png`` and, where speed was measured, ``quality-speed.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    _draw(
        entries,
        lambda entry: float(entry.session_bytes),
        f"bytes of state per session (ring: a 16-bit cache of {WINDOW} tokens, and growing)",
        folder / "quality-bytes.png",
    )
    timed = [entry for entry in entries if entry.speed]
    if timed:
        _draw(
            timed,
            decoding_rate,
            f"decoding, tokens/s of 16 sessions together (ring: a cache of {WINDOW} tokens)",
            folder / "quality-speed.png",
        )


def decoding_rate(entry: Competitor) -> float:
    """Tokens/s of 16 sessions."""
    assert entry.speed is not None, entry.name
    rates = entry.speed["tokens_per_s"]
    return float(next(rates[name] for name in RATES if name in rates))


def _draw(
    entries: list[Competitor], x: Callable[[Competitor], float], label: str, path: Path
) -> None:
    """One panel per size; the best corner is at the bottom."""
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(entry.size for entry in entries))
    figure = Figure(figsize=(7 * len(sizes), 5.5), layout="constrained")
    panels: Any = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, size in zip(panels, sizes, strict=True):
        axes.set(title=size, xscale="log", ylabel="bits per byte, validation, windows of 512")
        for entry in (entry for entry in entries if entry.size == size):
            colour = "tab:blue" if entry.constant else "tab:orange"
            point = (x(entry), entry.bits_per_byte())
            face = colour if entry.constant else "none"
            axes.plot(*point, "o", color=colour, markerfacecolor=face)
            axes.annotate(entry.name, point, (5, 3), textcoords="offset points", fontsize=8)
        axes.margins(x=0.15)
        axes.grid(alpha=0.3)
    figure.supxlabel(label, fontsize=10)
    figure.savefig(path, dpi=120)
