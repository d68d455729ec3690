"""What every benchmark reports: a table, a file of results, and a last line of JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.process import ROOT

RESULTS = ROOT / "benchmarks" / "results"
#: What a page has around a table, by the table's name.
MARKS = "<!-- {0} -->\n", "<!-- end of {0} -->"

Figures = dict[str, Any]


def table(title: str, columns: Iterable[str]) -> Table:
    """An empty table whose first column is words and whose others are numbers."""
    result = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        result.add_column(name, justify="right" if index else "left")
    return result


def show(*tables: Table, width: int = 120) -> None:
    """Prints the tables, ``width`` characters wide where the output is no terminal."""
    console = Console(width=None if sys.stdout.isatty() else width)
    for item in tables:
        console.print(item)


def figure_table(title: str, figures: Figures) -> Table:
    """Nested figures: a row for each innermost dictionary, a column for each figure in one."""
    rows = dict(_rows(figures, ()))
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    result = table(title, ("", *(name.replace("_", " ") for name in columns)))
    for path, row in rows.items():
        result.add_row(", ".join(path), *(_cell(row.get(name)) for name in columns))
    return result


def _rows(figures: Figures, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Figures]]:
    own = {name: value for name, value in figures.items() if not isinstance(value, dict | list)}
    if own:
        yield path, own
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from _rows(value, (*path, str(name)))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def print_result(
    benchmark: str,
    on: Figures,
    figures: Figures,
    output: Path | None = None,
    indent: int | None = None,
) -> None:
    """The last line: one JSON object, which also goes into the file ``output``."""
    result = {"benchmark": benchmark, "machine": on, **figures}
    if output:
        write_result(output, result, indent)
    print(json.dumps(result), flush=True)


def write_result(path: Path, result: Figures, indent: int | None = 1) -> None:
    """Writes a file of results."""
    text = json.dumps(result, indent=indent, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_result(path: Path) -> Figures:
    """The results in a file."""
    result: Figures = json.loads(path.read_text(encoding="utf-8"))
    return result


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---:") -> str:
    """A table whose first column is words; ``align`` is the rule of the others, of numbers."""
    lines = [head, ["---", *[align] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """``page`` with these tables in place of those that it has."""
    for name, table in tables.items():
        begin, end = (mark.format(name) for mark in MARKS)
        found = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        assert found.search(page), name
        text = f"{begin}\n{table}\n\n{end}"
        page = found.sub(text.replace("\\", r"\\"), page)
    return page
