"""The table of prompts that were read before: as ids, by a handle, as text."""

from __future__ import annotations

from benchmarks.report import Figures, markdown


def prompts_summary(result: Figures) -> str:
    """Medians of the same: a row for each length, and one for text over HTTP."""
    found = {
        row["name"]: row["value"] for part in ("prefix", "text") for row in result["parts"][part]
    }
    body = []
    for name in found:
        length, _, kind = name.partition(", ")
        if kind == "cold":
            ways = (f"{length}, {way}" for way in ("cold", "again", "by a handle"))
            body.append([length, *(_cell(found[way]) for way in ways)])
        elif kind == "new":
            ways = (f"{length}, {way}" for way in ("new", "again, HTTP"))
            body.append([f"{length}, HTTP", *(_cell(found[way]) for way in ways), ""])
    return markdown(["prompt", "new", "again", "by its handle"], body)


def _cell(value: float) -> str:
    return f"{value:,.1f} ms"
