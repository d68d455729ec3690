"""The table of a published Llama whose attention is replaced: `benchmarks.studies.linearized`."""

from __future__ import annotations

from typing import Any

from benchmarks.report import RESULTS, bullets, markdown, read_result
from benchmarks.studies.linearized import CONTROLS, SWAPS

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
    return {"linearized": markdown(head, [*controls, *swaps]), "linearized verdict": verdict(rows)}


def verdict(rows: dict[str, Any]) -> str:
    """What the rows say, in sentences that are made of them."""
    last = {
        name: row["bits_per_byte"]["fine-tuned"][SHOWN]
        for name, row in rows.items()
        if "fine-tuned" in row["bits_per_byte"]
    }
    source, window, equal = (last[f"{name} control"] for name in CONTROLS[:3])
    lines = []
    for place, words in (("whole", "As the whole attention"), ("far", "As the far part")):
        of_place = {name: bits for name, bits in last.items() if name.endswith(f" {place}")}
        best, worst = min(of_place, key=of_place.__getitem__), max(of_place.values())
        lines.append(
            f"- {words}, the {len(of_place)} that were run have {of_place[best]:.3f} "
            f"(`{best.removesuffix(f' {place}')}`) to {worst:.3f} bits per byte at the end; the "
            f"source that read the same tokens has {source:.3f}."
        )
        if place == "far":
            better = sum(bits < window for bits in of_place.values())
            beyond = sum(bits < equal for bits in of_place.values())
            lines.append(
                f"- Better than the window of 64 alone ({window:.3f}): {better} of "
                f"{len(of_place)}; than a window of 256 ({equal:.3f}), which takes about the "
                f"memory of window and state together: {beyond}."
            )
    for name in ("performer, orthogonal", "dijiang, published"):
        row = rows.get(f"{name} whole")
        if row is not None:
            bits = [row["bits_per_byte"][stage][SHOWN] for stage in STAGES]
            lines.append(
                f"- `{name}` in the place of the attention: {bits[0]:.3f} at once, {bits[1]:.3f} "
                f"matched, {bits[2]:.3f} fine-tuned."
            )
    return bullets(lines)


def _cells(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["not run"] * len(STAGES)
    bits = row["bits_per_byte"]
    return [f"{bits[stage][SHOWN]:.3f}" if stage in bits else "" for stage in STAGES]
