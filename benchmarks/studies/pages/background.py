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
STAGES = ("original", "swapped", "matched", "fine_tuned")


def drift_tables() -> dict[str, str]:
    """Of streams.md: errors by the format of the sums."""
    stored = _read("drift")["elu_stored_in"]
    narrow = [
        [f"{int(stop):,}", *(_scientific(errors[stop]) for errors in stored.values())]
        for stop in stored["float32"]
    ]
    return {"narrow sums": markdown(["tokens", "float64 (as it is)", *list(stored)[1:]], narrow)}


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
