"""The figures of `benchmarks.cluster` as tables, with what they are to reach."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from benchmarks.report import Figures, table

#: Of throughput with the embedded store, at 64 streams.
MAX_STORE_COST = 0.15
#: Of the p99 of a take-over, for one session.
MAX_TAKEOVER_MS = 1000.0

LOAD_COLUMNS = {
    "tokens_per_s": "tokens/s",
    "arrivals_p50_ms": "arrivals p50 ms",
    "arrivals_p99_ms": "p99",
    "server_us_per_token": "server CPU us/token",
    "database_us_per_token": "database",
    "load_us_per_token": "load",
    "commits_per_s": "commits/s",
    "wal_bytes_per_token": "WAL bytes/token",
}


def of_cost(found: Figures) -> list[Table]:
    """A row for each store and number of streams, and the ratios."""
    loads = table("cost of the store", ("store", "streams", *LOAD_COLUMNS.values()))
    ratios = table("by round", ("", "streams", "tokens/s", "CPU/token", "target", ""))
    for way, by_streams in found.items():
        for streams, figures in by_streams.items():
            if " / " not in way:
                loads.add_row(way, streams, *cells(figures, LOAD_COLUMNS))
                continue
            ratio, is_wanted = figures["tokens_per_s"], (way, streams) == WANTED
            target = (f"at least {1 - MAX_STORE_COST:g}", met(ratio >= 1 - MAX_STORE_COST))
            row = (f"{ratio:.3f}", f"{figures['cpu_per_token']:.3f}")
            ratios.add_row(way, streams, *row, *(target if is_wanted else ("", "")))
    return [loads, ratios]


WANTED = ("shared / embedded", "64")


def of_replicas(found: Figures) -> list[Table]:
    """A row for each number of replicas."""
    result = table("the same streams on more replicas", ("replicas", *LOAD_COLUMNS.values()))
    for num, figures in found.items():
        result.add_row(num, *cells(figures, LOAD_COLUMNS))
    return [result]


def of_commits(found: Figures) -> list[Table]:
    """A row for each store and number of sessions."""
    columns = {"p50_ms": "p50 ms", "p99_ms": "p99"}
    result = table("a commit alone, one token each", ("store", "sessions", *columns.values()))
    for way, by_streams in found.items():
        if way == "notice":
            result.add_row("a notice between replicas", "", *cells(by_streams, columns))
            continue
        for streams, figures in by_streams.items():
            result.add_row(way, streams, *cells(figures, columns))
    return [result]


def of_takeover(found: Figures) -> list[Table]:
    """A row for each kind and number of streams, and the parts of those after a kill."""
    columns = {"num": "waits", "p50_ms": "p50 ms", "p99_ms": "p99", "worst_ms": "worst"}
    waits = table("take-over", ("", "streams", *columns.values(), "target", ""))
    parts = table("its parts, median ms", ("", "streams", *PART_NAMES))
    for kind, by_streams in found.items():
        for streams, figures in by_streams.items():
            is_met = met(figures["p99_ms"] <= MAX_TAKEOVER_MS)
            target = (f"p99 at most {MAX_TAKEOVER_MS:g}", is_met) if streams == "1" else ("", "")
            waits.add_row(kind, streams, *cells(figures, columns), *target)
            own = figures["parts_p50_ms"]
            if own:
                parts.add_row(kind, streams, *(f"{value:,.1f}" for value in own.values()))
    return [waits, parts]


PART_NAMES = ("lock free", "found dead", "buried", "resumed", "first new token")


def of_idle(found: Figures) -> list[Table]:
    """A row for each figure."""
    result = table("at rest, of each replica", ("", ""))
    for name, value in found.items():
        result.add_row(name.replace("_", " "), f"{value:,}")
    return [result]


def of_paper(found: Figures) -> list[Table]:
    """Inputs and assumptions, and a column for each number of machines."""
    given = table("inputs and assumptions", ("", "", ""))
    for kind in ("inputs", "assumed"):
        for name, value in found[kind].items():
            given.add_row(name.replace("_", " "), f"{value:,}", kind)
    columns = found["machines"]
    result = table("on paper", ("", *(f"{one['machines']:,} machines" for one in columns)))
    for name in columns[0]:
        if name != "shares":
            result.add_row(name.replace("_", " "), *(_text(one[name]) for one in columns))
    for name in columns[0]["shares"]:
        shares = (f"{one['shares'][name]:.1%}" for one in columns)
        result.add_row(f"{name}: part of what there is", *shares)
    return [given, result]


def cells(figures: Figures, names: dict[str, str]) -> list[str]:
    """Those that were measured."""
    return [_text(figures[name]) if name in figures else "-" for name in names]


def met(is_met: bool) -> str:
    """What the last column says."""
    return "met" if is_met else "missed"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


TABLES: dict[str, Callable[[Figures], list[Table]]] = {
    "cost": of_cost,
    "commits": of_commits,
    "takeover": of_takeover,
    "replicas": of_replicas,
    "idle": of_idle,
}
