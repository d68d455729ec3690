"""The tables and the plot of docs/speed.md, from the results in ``benchmarks/results``.

python -m benchmarks.speed_report                            # prints the tables, draws the plot
python -m benchmarks.speed_report --decode S1.json S2.json   # first gathers runs of `decode`
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.decode.peers import OURS, TITLES
from benchmarks.decode.report import where
from benchmarks.process import ROOT
from benchmarks.report import RESULTS, Figures, write_result
from benchmarks.speed_report.results import PEERS, gather, read
from benchmarks.speed_report.tables import tables

PLOT = ROOT / "docs" / "speed.png"


def plot(rows: Sequence[Figures], path: Path) -> None:
    """Tokens/s by context, for one stream and for 64: S1, bfloat16, one thread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels: Any = figure.subplots(1, 2)
    of_size = where(rows, size="S1", threads=1, mode="decode", dtype="bfloat16")
    for axes, streams in zip(panels, (1, 64), strict=True):
        here = where(of_size, streams=streams)
        contexts = [row["context"] for row in here]
        axes.set(title=f"{streams} stream{'s' if streams > 1 else ''}", yscale="log")
        axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
        for name in (OURS[0], *PEERS):
            points = [
                (i, row["contenders"][name])
                for i, row in enumerate(here)
                if name in row["contenders"]
            ]
            heights = [figures["tokens_per_s"] for _, figures in points]
            axes.plot([i for i, _ in points], heights, "o-", label=TITLES[name])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("tokens/s, all streams")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.supxlabel("tokens of context", fontsize=10)
    figure.savefig(path, dpi=110)


def main(command: Sequence[str] | None = None) -> None:
    """Gathers where asked to, prints the tables, draws the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--decode", type=Path, nargs="+", help="runs of `decode` to gather")
    options = parser.parse_args(command)
    if options.decode:
        write_result(RESULTS / "decode.json", gather(options.decode), indent=None)
    results = read()
    print("\n\n".join(tables(results)))
    plot(results["decode"]["rows"], PLOT)


if __name__ == "__main__":
    main()
