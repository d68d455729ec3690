"""The tables of docs/background/streams.md and of convert.md."""

from __future__ import annotations

from typing import Any

from benchmarks.report import RESULTS, markdown, read_result

#: As the table of conversions calls them.
CONVERSIONS = {
    "window": "`window_linear`, window 32",
    "performer": "`performer`",
    "gated": "`gated`",
}
#: Of a text of recall.
PAIRS = 32
STAGES = ("original", "swapped", "matched", "fine_tuned")


def drift_tables() -> dict[str, str]:
    """Of streams.md: errors by the format of the sums."""
    stored = _read("drift")["elu_stored_in"]
    narrow = [
        [f"{int(stop):,}", *(_scientific(errors[stop]) for errors in stored.values())]
        for stop in stored["float32"]
    ]
    head = ["tokens", "float64 (as it is)", *list(stored)[1:]]
    return {"narrow sums": markdown(head, narrow), **_state_dtype_tables()}


def _state_dtype_tables() -> dict[str, str]:
    """How to round, and what sums in bfloat16 cost, by mechanism and family."""
    result = _read("state_dtype")
    roundings = [
        [f"`{name}`", *(_scientific(error) for by in errors.values() for error in by.values())]
        for name, errors in result["roundings"].items()
    ]
    stops = [f"{int(stop):,}" for stop in next(iter(result["roundings"].values()))["nearest"]]
    head = [f"{how}, {stop}" for how in ("nearest", "at random") for stop in stops]
    rows = []
    for name, figures in result["subjects"].items():
        wide, narrow = figures["bits_per_byte"].values()
        more = round(100 * (narrow / wide - 1), 2) + 0.0  # no negative zero
        drift = (f"{value:.3f}" for value in figures["drift"].values())
        recall = ["", ""]
        if "recall" in figures:
            recall = [f"{by[str(PAIRS)]:.3f}" for by in figures["recall"].values()]
        rows.append([name, f"{wide:.3f}", f"{more:+.2f} %", *drift, *recall])
    costs = ["", "bits per byte", "more", "drift, first tenth", "last tenth"]
    costs += ["recall, float32", "bfloat16"]
    return {
        "roundings": markdown(["", *head], roundings),
        "state dtype": markdown(costs, rows),
    }


def conversion_tables() -> dict[str, str]:
    """Of docs/contribute/convert.md."""
    result = _read("conversion")
    rows = [
        [label, *(f"{result[name]['bits_per_byte'][stage]:.4f}" for stage in STAGES)]
        for name, label in CONVERSIONS.items()
    ]
    head = ["to", "before", "after the swap", "after matching", "after fine-tuning"]
    return {"conversion": markdown(head, rows)}


def _read(name: str) -> dict[str, Any]:
    return read_result(RESULTS / f"{name}.json")


def _scientific(error: float) -> str:
    """Two figures, such as 2.5e-7, 0.36 or 11."""
    return f"{error:.0f}" if error >= 10 else f"{error:#.2g}".replace("e-0", "e-")
