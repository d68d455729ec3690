"""What `decode` found: figures from raw rounds, ratios, tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table

from benchmarks.decode.peers import NATIVE_PEERS, OURS, TITLES, Measured, Opened, Point
from benchmarks.decode.roofline import Limit
from benchmarks.report import Figures, show, table

#: Of the tables, in characters.
WIDTH = 160


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

    def ratio(self, peer: str) -> float | None:
        """How many times as fast as ``peer`` the first of `OURS` is."""
        if OURS[0] not in self.turns or peer not in self.turns:
            return None
        return self.turns[OURS[0]].tokens_per_s / self.turns[peer].tokens_per_s


def figures_of(row: Row) -> Figures:
    """A row for the line of JSON."""
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
        if peer not in OURS and (ratio := row.ratio(peer)) is not None
    }
    return {**asdict(row.point), "contenders": contenders, "ratios": ratios, "skipped": row.skipped}


def best_of(rows: Iterable[Row]) -> list[Figures]:
    """Our best precision against the peers' best, for every point but its type of weights."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        point = row.point
        key = (point.size, point.mode, point.threads, point.streams, point.context)
        groups.setdefault(key, []).append(row)
    result = []
    for (size, mode, threads, streams, context), group in groups.items():
        ours, peers = _best(group, OURS), _best(group, NATIVE_PEERS)
        if ours and peers:
            where = {"size": size, "mode": mode, "threads": threads}
            where |= {"streams": streams, "context": context}
            ratio = ours["tokens_per_s"] / peers["tokens_per_s"]
            result.append({**where, "ours": ours, "peer": peers, "ratio": round(ratio, 3)})
    return result


def _best(rows: Sequence[Row], names: Iterable[str]) -> Figures | None:
    found = [
        {"name": name, "dtype": row.point.dtype, "tokens_per_s": row.turns[name].tokens_per_s}
        for row in rows
        for name in names
        if name in row.turns
    ]
    return max(found, key=lambda figures: figures["tokens_per_s"], default=None)


def print_rows(rows: Sequence[Row], names: Sequence[str]) -> None:
    """A table for each size and number of threads; beside a peer, how much faster ours is."""
    shown = [name for name in names if any(name in row.turns for row in rows)]
    tables: dict[tuple[str, str, int], Table] = {}
    for row in rows:
        point = row.point
        key = (point.mode, point.size, point.threads)
        if key not in tables:
            title = f"tokens/s, {point.mode}, {point.size}, {point.threads} thread(s)"
            columns = (*(TITLES[name] for name in shown), "of roofline")
            tables[key] = table(title, ("weights", "streams", "context", *columns))
        tables[key].add_row(
            point.dtype,
            str(point.streams),
            f"{point.context:,}",
            *(_cell(row, name) for name in shown),
            f"{row.turns[OURS[0]].fraction:.0%}" if OURS[0] in row.turns else "",
        )
    show(*tables.values(), width=WIDTH)


def _cell(row: Row, name: str) -> str:
    """Tokens/s; of ours with their spread, of a peer with how many times as fast ours are."""
    if name not in row.turns:
        return ""
    turns, ratio = row.turns[name], row.ratio(name)
    if name in OURS:
        return f"{turns.tokens_per_s:,.0f} ±{turns.spread / 2:.0%}"
    return f"{turns.tokens_per_s:,.0f}" + (f" ({ratio:.2f}x)" if ratio else "")


def print_best(best: Sequence[Figures]) -> None:
    """A table of the best against the best."""
    columns = ("size", "mode", "threads", "streams", "context", "ours", "peer", "ratio")
    result = table("our best precision against the best of llama.cpp's, tokens/s", columns)
    for figures in best:
        cells = [str(figures[name]) for name in columns[:5]]
        for side in ("ours", "peer"):
            one = figures[side]
            cells.append(f"{one['name']} {one['dtype']} {one['tokens_per_s']:,.0f}")
        result.add_row(*cells, f"{figures['ratio']:.2f}")
    show(result)
