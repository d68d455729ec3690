"""Quality against the bytes of a session, and against the speed of decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.mechanisms.gather import Competitor
from benchmarks.mechanisms.quality import WINDOW

#: The rate that the second plot shows: a cache at its shorter length.
RATES = ("decode_16", f"decode_16_at_{WINDOW}")


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
