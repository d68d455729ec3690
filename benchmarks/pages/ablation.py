"""The tables of the questions that `benchmarks.mechanisms.plan` asks, of what has finished.

Intervals are those of the seeds: mean ± standard deviation.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.mechanisms.plan import CONVERTED, RATED, RATES, RECALLED, STATES
from benchmarks.mechanisms.specs import BASELINE, Spec
from benchmarks.report import markdown

Run = dict[str, Any]
#: Rows of the parts that stand in the table of the maps as well.
COMPARED = (BASELINE, "elu", "retnet")
#: What else is shown of a run: text and way of reading.
MORE = (("valid", "long"), ("out_of_domain", "windows"))
NOTHING, MISSING = "No run has finished yet.", "-"


def tables_of(runs: list[Run]) -> dict[str, str]:
    """By name; one without runs says so. ``runs`` have the names of their jobs."""
    of: dict[str, list[Run]] = {}
    for run in runs:
        of.setdefault(run["name"].partition("-")[0], []).append(run)
    made: dict[str, Callable[[list[Run]], str]] = {
        "parts": parts_table,
        "maps": lambda found: parts_table([*found, *_named(of.get("parts", []), COMPARED)]),
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


def parts_table(runs: list[Run]) -> str:
    """Bits per byte over the seeds, the fewest first."""
    groups = _by_mechanism(runs)
    found = {name: [_bits(run) for run in group] for name, group in groups.items()}
    baseline = found.get(BASELINE)
    rows = []
    for name in sorted(found, key=lambda name: statistics.fmean(found[name])):
        run = groups[name][0]
        gap = statistics.fmean(found[name]) - statistics.fmean(baseline) if baseline else None
        rows.append(
            [
                f"`{name}`",
                str(len(found[name])),
                interval(found[name], 4),
                MISSING if gap is None or name == BASELINE else f"{gap:+.4f}",
                *(interval([_bits(each, *which) for each in groups[name]], 4) for which in MORE),
                f"{run['num_parameters']:,}",
                f"{run['state_bytes']:,}" if "state_bytes" in run else "grows",
            ]
        )
    head = ["mechanism", "seeds", "bits per byte", f"against {BASELINE}", "long past"]
    return markdown([*head, "out of domain", "parameters", "bytes per session"], rows)


def rates_table(runs: list[Run]) -> str:
    """Bits per byte by the peak learning rate, of the first seed."""
    found = {
        (run["mechanism"], run["recipe"]["learning_rate"]): _bits(run)
        for run in runs
        if run["seed"] == 0
    }
    cells = [
        [f"`{name}`", *(_cell(found.get((name, rate)), ".4f") for rate in RATES)]
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
    for name in (str(Spec.parse(text)) for text in (BASELINE, *RECALLED)):
        values = [found.get((name, state)) for state in (STATES if name != BASELINE else (0,))]
        cells = [MISSING if each is None else _percent(each) for each in values]
        rows.append([f"`{name}`", *(cells * len(STATES) if name == BASELINE else cells)])
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
            rows.append([label, *(_cell(bits.get(stage), ".4f") for stage in stages)])
    head = ["to", "before", "after the swap", "after matching", "after fine-tuning"]
    return markdown(head, rows)


def _named(runs: list[Run], names: tuple[str, ...]) -> list[Run]:
    return [run for run in runs if run["mechanism"] in names]


def _by_mechanism(runs: list[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run["mechanism"], []).append(run)
    return groups


def _bits(run: Run, text: str = "valid", way: str = "windows") -> float:
    bits: float = run["quality"][text]["bits_per_byte"][way]
    return bits


def interval(values: list[float], places: int) -> str:
    """The mean and, of several, the standard deviation."""
    spread = f" ± {statistics.stdev(values):.{places}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{places}f}{spread}"


def _percent(values: list[float]) -> str:
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread} %"


def _cell(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)
