"""What every benchmark reports: a table, a file of results, and a last line of JSON."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
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
    """Prints the tables, ``width`` characters wide where the output is not a terminal."""
    console = Console(width=None if sys.stdout.isatty() else width)
    for item in tables:
        console.print(item)


def show_figures(title: str, figures: Figures) -> None:
    """Prints nested figures as a table."""
    show(figure_table(title, figures))


def figure_table(title: str, figures: Figures) -> Table:
    """Nested figures: a row for each innermost dictionary, a column for each figure in one."""
    rows = dict(_rows(figures, ()))
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    result = table(title, ("", *(str(name).replace("_", " ") for name in columns)))
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
    if isinstance(value, float):
        return f"{value:,.2f}" if value == 0 or abs(value) >= 0.1 else f"{value:.2g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def command_line(doc: str | None, output: Path | None = None) -> argparse.ArgumentParser:
    """The options of a benchmark with this docstring: ``--output``, and what the caller adds."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=output, help="file to write the result to")
    return parser


class Result:
    """The result of one run; made before it begins, as the machine's load then is part of it."""

    def __init__(self, benchmark: str, output: Path | None = None) -> None:
        command = shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]])
        self.origin = {"benchmark": benchmark, "command": command, "machine": machine()}
        self._output = output

    def save(self, figures: Figures) -> None:
        """Writes the file, where there is one; for what was measured until now."""
        if self._output:
            write_result(self._output, {**self.origin, **figures})

    def finish(self, figures: Figures) -> None:
        """Writes the file, and prints the last line: one JSON object."""
        self.save(figures)
        print(json.dumps({**self.origin, **figures}), flush=True)


def write_result(path: Path, result: Figures) -> None:
    """Writes a file of results."""
    text = json.dumps(result, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_result(path: Path) -> Figures:
    """The results in a file."""
    result: Figures = json.loads(path.read_text(encoding="utf-8"))
    return result


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---:") -> str:
    """A table whose first column is words; ``align`` is the rule of the others, of numbers."""
    lines = [head, ["---", *[align] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """Points of a list, in lines as long as those of pages."""
    return "\n".join(
        textwrap.fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) for line in lines
    )


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """``page`` with these tables in place of those that it has."""
    for name, table in tables.items():
        begin, end = (mark.format(name) for mark in MARKS)
        found = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        assert found.search(page), name
        text = f"{begin}\n{table}\n\n{end}"
        page = found.sub(text.replace("\\", r"\\"), page)
    return page
