"""What the parts of `benchmarks.sessions` measure, and what they are to reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.table import Table

from benchmarks.report import Figures, table
from benchmarks.serve.load import percentile_ms


@dataclass(frozen=True)
class Target:
    """A bound on the ``of`` figure of a row."""

    bound: float
    kind: Literal["at most", "at least"] = "at most"
    of: Literal["value", "p99"] = "value"

    def is_met(self, figure: float) -> bool:
        """Whether ``figure`` is on the right side."""
        return figure <= self.bound if self.kind == "at most" else figure >= self.bound


@dataclass(frozen=True)
class Row:
    """One line: a median where there is a ``p99``, both in ``unit``."""

    name: str
    value: float
    unit: str
    p99: float | None = None
    target: Target | None = None

    @property
    def is_met(self) -> bool | None:
        """None where there is nothing to meet."""
        if self.target is None:
            return None
        figure = self.p99 if self.target.of == "p99" else self.value
        assert figure is not None, self
        return self.target.is_met(figure)


def times(name: str, seconds: Sequence[float], target: Target | None = None) -> Row:
    """A row of milliseconds."""
    median, p99 = percentile_ms(seconds, 50), percentile_ms(seconds, 99)
    assert median is not None, name
    return Row(name, median, "ms", p99 if len(seconds) > 1 else None, target)


def table_of(part: str, rows: Sequence[Row]) -> Table:
    """The rows of a part, with what they are to reach."""
    result = table(part, ("", "median", "p99", "unit", "target", ""))
    for row in rows:
        p99 = "" if row.p99 is None else f"{row.p99:,.3f}"
        target = "" if row.target is None else f"{row.target.kind} {row.target.bound:g}"
        if row.target is not None and row.target.of == "p99":
            target = f"p99 {target}"
        met = {None: "", True: "met", False: "missed"}[row.is_met]
        result.add_row(row.name, f"{row.value:,.3f}", p99, row.unit, target, met)
    return result


def figures_of(rows: Sequence[Row]) -> list[Figures]:
    """The rows for the line of JSON."""
    return [{**asdict(row), "met": row.is_met} for row in rows]
