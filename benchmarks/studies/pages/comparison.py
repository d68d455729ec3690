"""The tables of comparison.md and comparison-tables.md, of `benchmarks.studies.mechanisms`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.report import RESULTS, markdown, read_result
from benchmarks.studies.mechanisms.gather import (
    competitors,
    of_question,
    seed_deviation,
)
from benchmarks.studies.mechanisms.plan import SHOWN, STATES
from benchmarks.studies.mechanisms.specs import BASELINE, Spec
from benchmarks.studies.pages import ablation

Run = dict[str, Any]
RESULT = RESULTS / "mechanisms.json"
MISSING = "-"
#: The bytes of state at which the summary shows recall.
RECALL_STATE = STATES[1]


def summary() -> dict[str, str]:
    """The table of docs/background/comparison.md."""
    return {"summary": summary_table(read_result(RESULT)["runs"])}


def tables() -> dict[str, str]:
    """Those of docs/contribute/comparison-tables.md."""
    return ablation.tables_of(read_result(RESULT)["runs"])


def summary_table(runs: list[Run]) -> str:
    """One row for each mechanism of the summary, the fewest bits per byte first."""
    entries = competitors(runs)
    (baseline,) = (entry for entry in entries if entry.name == BASELINE)
    deviation = seed_deviation(entry.values() for entry in entries)
    shown = {str(Spec.parse(text)) for text in SHOWN}
    recalled: dict[str, list[float]] = {}
    for run in of_question(runs, "recall"):
        if run["name"].split("-")[1] in (str(RECALL_STATE), "0"):
            recalled.setdefault(run["mechanism"], []).append(list(run["accuracy"].values())[-1])
    rows = []
    for entry in (entry for entry in entries if entry.name in shown):
        gap = entry.bits_per_byte() - baseline.bits_per_byte()
        rate = entry.speed["tokens_per_s"] if entry.speed else None
        right = recalled.get(entry.name)
        rows.append(
            [
                f"`{entry.name}`",
                ablation.interval(entry.values(), 3, deviation),
                MISSING if entry is baseline else f"{gap:+.3f}",
                f"{entry.session_bytes:,}" if entry.constant else "grows",
                MISSING if right is None else f"{statistics.fmean(right):.0%}",
                MISSING if rate is None else _decode(rate, 16),
            ]
        )
    head = ["mechanism", "bits per byte", f"against {BASELINE}", "bytes per session", "recall"]
    return markdown([*head, "decoding"], rows)


def _rates(rates: dict[str, float], sessions: int) -> list[tuple[str, float]]:
    wanted = f"decode_{sessions}_"
    return [(name, rate) for name, rate in rates.items() if f"{name}_".startswith(wanted)]


def _decode(rates: dict[str, float], sessions: int) -> str:
    """One figure, or one for each length of the cache."""
    found = _rates(rates, sessions)
    if len(found) == 1:
        return f"{found[0][1]:,.0f}"
    return ", ".join(f"{rate:,.0f} at {name.rpartition('_')[2]}" for name, rate in found)
