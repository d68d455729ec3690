"""The committed results of the speed benchmarks: reading, gathering, and the best at a point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.decode.peers import NATIVE_PEERS
from benchmarks.report import RESULTS, Figures, read_result

NAMES = ("decode", "serve", "server_cost", "capacity", "flatness_native")
#: "PyTorch, eager" and "PyTorch, compiled" run our own model and are no peers.
PEERS = (*NATIVE_PEERS, "generate")
#: Raw figures of every turn, which the committed file leaves out.
RAW = ("rounds", "bandwidths")


@dataclass(frozen=True)
class Best:
    """The fastest of some contenders at a point, and on which threads and type of weights."""

    name: str
    row: Figures

    @property
    def figures(self) -> Figures:
        found: Figures = self.row["contenders"][self.name]
        return found

    @property
    def rate(self) -> float:
        return float(self.figures["tokens_per_s"])


def read(folder: Path = RESULTS) -> dict[str, Figures]:
    """The results by name."""
    return {name: read_result(folder / f"{name}.json") for name in NAMES}


def gather(paths: Iterable[Path]) -> Figures:
    """Several runs of `decode` as one result, without their raw rounds."""
    runs = [read_result(path) for path in paths]
    rows = [row for run in runs for row in run["rows"]]
    for contender in (figures for row in rows for figures in row["contenders"].values()):
        contender["bytes_per_s"] = max(contender["bandwidths"])
        for name in RAW:
            del contender[name]
    kept = ("machine", "rounds", "seconds")
    settings = [
        {
            "sizes": sorted({row["size"] for row in run["rows"]}),
            **{name: run[name] for name in kept},
        }
        for run in runs
    ]
    return {"benchmark": "decode", "runs": settings, "rows": rows}


def best(rows: Iterable[Figures], names: Sequence[str], threads: int) -> Best | None:
    """The fastest of the contenders called ``names``, on up to so many threads."""
    found = [
        Best(name, row)
        for row in rows
        for name in names
        if name in row["contenders"] and row["threads"] <= threads
    ]
    return max(found, key=lambda one: one.rate, default=None)
