"""Contenders measured in turns, and what they found: figures from raw rounds, ratios, tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.decode.peers import OURS, TITLES, Contender, Measured, Opened, Point, Unavailable
from benchmarks.decode.roofline import Limit, Rates, bandwidth
from benchmarks.report import Figures, markdown, read_result

MISSING = "-"
#: Raw figures of every turn, which a gathered result leaves out.
RAW = ("rounds", "bandwidths")
SHORT = {"float32": "f32", "bfloat16": "bf16", "int8": "int8", "int4": "int4"}


@dataclass
class Turns:
    """What one contender did at one point."""

    opened: Opened
    operations_per_s: float
    rounds: list[Measured] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)  # bytes/s, one before each round

    @property
    def rates(self) -> list[float]:
        return [measured.tokens / measured.seconds for measured in self.rounds]

    @property
    def tokens_per_s(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """From the slowest to the fastest round, as a part of the median."""
        return (max(self.rates) - min(self.rates)) / self.tokens_per_s

    @property
    def limit(self) -> Limit:
        """From the best bandwidth of all rounds."""
        return Limit.of(self.opened.cost, max(self.bandwidths), self.operations_per_s)

    @property
    def fraction(self) -> float:
        """Of the roofline."""
        return self.limit.fraction(self.opened.step_tokens / self.tokens_per_s)


@dataclass
class Row:
    """One point: who was measured, and why others were not."""

    point: Point
    turns: dict[str, Turns] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def ratio(self, peer: str, ours: str = OURS[0]) -> float | None:
        """How many times as fast as ``peer`` the contender ``ours`` is."""
        if ours not in self.turns or peer not in self.turns:
            return None
        return self.turns[ours].tokens_per_s / self.turns[peer].tokens_per_s


def figures_of(row: Row, ours: Sequence[str] = OURS) -> Figures:
    """A row for the line of JSON; ratios are of the first of ``ours`` by each peer."""
    contenders = {
        name: {
            "tokens_per_s": round(turns.tokens_per_s, 2),
            "spread": round(turns.spread, 4),
            "rounds": [asdict(measured) for measured in turns.rounds],
            "variant": turns.opened.variant,
            "num_parameters": turns.opened.num_parameters,
            "step_tokens": turns.opened.step_tokens,
            "step_bytes": turns.opened.cost.num_bytes,
            "step_operations": turns.opened.cost.operations,
            "bandwidths": [round(value) for value in turns.bandwidths],
            "operations_per_s": round(turns.limit.operations_per_s),
            "bound": turns.limit.bound,
            "roofline_tokens_per_s": round(turns.opened.step_tokens / turns.limit.seconds, 2),
            "fraction": round(turns.fraction, 4),
        }
        for name, turns in row.turns.items()
    }
    ratios = {
        peer: round(ratio, 3)
        for peer in row.turns
        if peer not in ours and (ratio := row.ratio(peer, ours[0])) is not None
    }
    return {**asdict(row.point), "contenders": contenders, "ratios": ratios, "skipped": row.skipped}


def gather(paths: Iterable[Path]) -> Figures:
    """Several runs as one result, without their raw rounds."""
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
    return {"runs": settings, "rows": rows}


def where(rows: Iterable[Figures], **point: object) -> list[Figures]:
    """The rows of these values."""
    return [row for row in rows if all(row[name] == value for name, value in point.items())]


def points_of(rows: Iterable[Figures], *names: str) -> list[tuple[Any, ...]]:
    """What these fields are together, in the order in which they come."""
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def rate_tables(rows: Sequence[Figures], mode: str = "decode") -> Iterator[str]:
    """Tokens/s of every contender, a heading and a table for each size and number of threads."""
    for size, threads in points_of(rows, "size", "threads"):
        yield f"### {size}, {threads} thread{'s' if threads > 1 else ''}"
        body = []
        for row in where(rows, size=size, threads=threads, mode=mode):
            point = [SHORT[row["dtype"]], str(row["streams"]), f"{row['context']:,}"]
            body.append([*point, *(_rate(row, name) for name in TITLES)])
        yield markdown(["weights", "streams", "context", *TITLES.values()], body)


def _rate(row: Figures, name: str) -> str:
    if name not in row["contenders"]:
        return MISSING
    figures = row["contenders"][name]
    return f"{figures['tokens_per_s']:,.0f} ± {figures['spread'] / 2:.0%}"


def measure(
    point: Point, workers: Mapping[str, Contender], rates: Rates, num_rounds: int, seconds: float
) -> Row:
    """Opens all, then runs them in turns; the bandwidth is measured before each."""
    row = Row(point)
    for name, worker in workers.items():
        try:
            row.turns[name] = Turns(worker.open(point), rates.of(point.dtype, point.threads))
        except Unavailable as reason:
            row.skipped[name] = str(reason)
    for number in range(num_rounds):
        for name in list(row.turns) if number % 2 == 0 else list(reversed(row.turns)):
            turns = row.turns[name]
            turns.bandwidths.append(bandwidth(turns.opened.cost.num_bytes, point.threads))
            try:
                turns.rounds.append(workers[name].run(seconds))
            except Unavailable as reason:
                row.skipped[name] = str(reason)
                del row.turns[name]
    return row
