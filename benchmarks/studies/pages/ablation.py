"""The tables of the questions that `benchmarks.studies.mechanisms.plan` asks, of what has finished.

Intervals are those of the seeds: the mean ± two standard errors, of the standard deviation of one
seed, pooled over all rows of the parts and maps that have several.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.report import markdown
from benchmarks.studies.mechanisms.gather import COMPARED, of_question, seed_deviation
from benchmarks.studies.mechanisms.plan import (
    CONVERTED,
    RATED,
    RATES,
    RECALL_CONTROLS,
    RECALLED,
    STATES,
)
from benchmarks.studies.mechanisms.specs import BASELINE, Spec

Run = dict[str, Any]
#: Rows of the parts that stand in the table of the maps as well.
FROM_PARTS = (BASELINE, "elu", "retnet")
NOTHING, MISSING = "No run has finished yet.", "-"


def tables_of(runs: list[Run]) -> dict[str, str]:
    """By name; one without runs says so. ``runs`` have the names of their jobs."""
    of: dict[str, list[Run]] = {}
    for run in runs:
        of.setdefault(run["name"].partition("-")[0], []).append(run)
    rows = _by_mechanism(of_question(runs, *COMPARED)).values()
    deviation = seed_deviation([[_bits(run) for run in row] for row in rows])
    made: dict[str, Callable[[list[Run]], str]] = {
        "parts": lambda found: parts_table(found, deviation),
        "maps": lambda found: parts_table(
            [*found, *_named(of.get("parts", []), FROM_PARTS)], deviation
        ),
        "rates": lambda found: rates_table([*found, *of.get("parts", [])]),
        "long": parts_table,
        "recall": recall_table,
        "recall_apart": recall_table,
        "conversion": conversion_table,
    }
    return {
        f"ablation, {question}": table(of[question]) if question in of else NOTHING
        for question, table in made.items()
    }


def parts_table(runs: list[Run], deviation: float = 0.0) -> str:
    """Bits per byte over the seeds, the fewest first, with the ``deviation`` of one seed."""
    groups = _by_mechanism(runs)
    found = {name: [_bits(run) for run in group] for name, group in groups.items()}
    rows = []
    for name in sorted(found, key=lambda name: statistics.fmean(found[name])):
        run = groups[name][0]
        rows.append(
            [
                f"`{name}`",
                str(len(found[name])),
                interval(found[name], 4, deviation),
                f"{statistics.fmean(_bits(each, 'long') for each in groups[name]):.4f}",
                f"{run['state_bytes']:,}" if "state_bytes" in run else "grows",
            ]
        )
    head = ["mechanism", "seeds", "bits per byte", "long past", "bytes per session"]
    return markdown(head, rows)


def rates_table(runs: list[Run]) -> str:
    """Bits per byte by the peak learning rate, the mean over seeds."""
    found: dict[tuple[str, float], list[float]] = {}
    for run in runs:
        key = run["mechanism"], run["recipe"]["learning_rate"]
        found.setdefault(key, []).append(_bits(run))
    means = {key: statistics.fmean(values) for key, values in found.items()}
    cells = [
        [f"`{name}`", *(_cell(means.get((name, rate)), ".4f") for rate in RATES)]
        for name in (str(Spec.parse(text)) for text in RATED)
    ]
    return markdown(["mechanism", *(f"{rate:g}" for rate in RATES)], cells)


def recall_table(runs: list[Run]) -> str:
    """Right answers for the most pairs, by the bytes of state of a model."""
    found: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        wanted = int(run["name"].split("-")[1])
        found.setdefault((run["mechanism"], wanted), []).append(list(run["accuracy"].values())[-1])
    rows = []
    for text in (*RECALL_CONTROLS, *RECALLED):
        name = str(Spec.parse(text))
        states = [0] * len(STATES) if text in RECALL_CONTROLS else STATES
        values = [found.get((name, state)) for state in states]
        rows.append([f"`{name}`", *(MISSING if not each else _percent(each) for each in values)])
    return markdown(["mechanism", *(f"{state:,} bytes" for state in STATES)], rows)


def conversion_table(runs: list[Run]) -> str:
    """Bits per byte before and after; softmax is the control."""
    groups = _by_mechanism(runs)
    stages = ("original", "swapped", "matched", "fine_tuned")
    rows = []
    for name in (str(Spec.parse(text)) for text in CONVERTED):
        if name in groups:
            bits = groups[name][0]["bits_per_byte"]
            label = f"`{name}`" + (", trained further" if name == BASELINE else "")
            cells = (_cell(bits.get(stage), ".4f") for stage in stages)
            rows.append([label, *cells, f"{groups[name][0]['num_parameters']:,}"])
    head = ["to", "before", "after the swap", "after matching", "after fine-tuning"]
    return markdown([*head, "parameters"], rows)


def _named(runs: list[Run], names: tuple[str, ...]) -> list[Run]:
    return [run for run in runs if run["mechanism"] in names]


def _by_mechanism(runs: list[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run["mechanism"], []).append(run)
    return groups


def _bits(run: Run, way: str = "windows") -> float:
    bits: float = run["quality"]["valid"]["bits_per_byte"][way]
    return bits


def interval(values: list[float], places: int, deviation: float) -> str:
    """The mean and two standard errors, unless the ``deviation`` of one value is not known (0)."""
    spread = f" ± {2 * deviation / math.sqrt(len(values)):.{places}f}" if deviation else ""
    return f"{statistics.fmean(values):.{places}f}{spread}"


def _percent(values: list[float]) -> str:
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread} %"


def _cell(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)
