"""The table of prompts that were read before: as ids, by a handle, as text."""

from __future__ import annotations

from benchmarks.report import Figures, markdown


def prompts_table(result: Figures) -> str:
    """Milliseconds to the first token, and how many times quicker than a new prompt."""
    body = [
        [row["name"], _cell(row["value"], row["unit"]), _cell(row["p99"], row["unit"])]
        for part in ("prefix", "text")
        for row in result["parts"][part]
    ]
    return markdown(["prompt", "first token, median", "p99"], body)


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.0f} times" if unit == "x" else f"{value:,.1f} ms"
