"""A plot of a sweep: throughput and latency against the load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clients.bench.figures import Limits, Summary


def draw(levels: Sequence[Summary], limits: Limits, path: Path) -> None:
    """Writes the plot; the file's suffix determines its format."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rated = levels[0].rate is not None
    loads = [float(level.rate or level.streams or 0) for level in levels]
    figure, (output, ttft, itl) = pyplot.subplots(
        1, 3, figsize=(13, 4), layout="constrained", sharex=True
    )
    output.plot(loads, [level.requests_per_s for level in levels], "o-", label="all")
    output.plot(loads, [level.goodput_per_s for level in levels], "s--", label="within the limits")
    output.set_ylabel("requests per second")
    for axes, name, title, limit in (
        (ttft, "ttft", "TTFT, ms", limits.ttft_ms),
        (itl, "itl", "ITL, ms", limits.itl_ms),
    ):
        for percent, style in ((50, "o-"), (90, "s-"), (99, "^-")):
            times = [getattr(level, f"{name}_p{percent}_ms") for level in levels]
            axes.plot(loads, times, style, label=f"p{percent}")
        if limit is not None:
            axes.axhline(limit, color="black", linewidth=1, linestyle=":", label="limit")
        axes.set_ylabel(title)
        axes.set_yscale("log")
    for axes in (output, ttft, itl):
        axes.set_xlabel("requests per second" if rated else "concurrent streams")
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
