"""The table of a published Llama whose attention is replaced: `benchmarks.linearized`."""

from __future__ import annotations

from typing import Any

from benchmarks.linearized import CONTROLS, SWAPS
from benchmarks.report import RESULTS, markdown, read_result

STAGES = "at once", "matched", "fine-tuned"
#: The text whose bits per byte are shown.
SHOWN = "valid.txt"
#: What the controls are called on the page.
NAMES = {"source": "SmolLM2 itself", "relative": "the far part of `everstream convert`"}


def tables() -> dict[str, str]:
    """Bits per byte after each stage, in both places."""
    rows = read_result(RESULTS / "linearized.json")["rows"]
    head = ["", *(f"{place}, {stage}" for place in ("far part", "all") for stage in STAGES)]
    controls = [
        [NAMES.get(name, name), *_cells(rows.get(f"{name} control")), *[""] * len(STAGES)]
        for name in CONTROLS
    ]
    swaps = [
        [name, *_cells(rows.get(f"{name} far")), *_cells(rows.get(f"{name} whole"))]
        for name in SWAPS
    ]
    return {"linearized": markdown(head, [*controls, *swaps])}


def _cells(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["not run"] * len(STAGES)
    bits = row["bits_per_byte"]
    return [f"{bits[stage][SHOWN]:.3f}" if stage in bits else "" for stage in STAGES]
