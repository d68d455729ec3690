"""The tables of docs/background/streams.md, and of measurements.md and convert.md."""

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
#: Of what was read in chunks, the tokens after which the table has the error.
STOPS = ("1000", "1000000")
MISSING = "-"


def stream_tables() -> dict[str, str]:
    """Of docs/contribute/measurements.md."""
    return {"drift": drift_table()}


def drift_table() -> str:
    """Errors by the length of the stream."""
    result = _read("drift")
    rwkv7 = _read("drift_rwkv7")
    rows = [
        _drift_row(name, growth, result["after_1e8"][name]["state"])
        for name, growth in result["growth"].items()
        if "1000000" in growth["chunks"]
    ]
    rows.append(_drift_row("rwkv7", rwkv7["growth"]["rwkv7"], {}))
    head = ["mechanism", "chunks, 1e3", "1e6", "steps, 1e4", "move after 1e8"]
    return markdown([*head, "the same, float32"], rows)


def drift_tables() -> dict[str, str]:
    """Of streams.md: errors by the format of the sums."""
    stored = _read("drift")["elu_stored_in"]
    narrow = [
        [f"{int(stop):,}", *(_scientific(errors[stop]) for errors in stored.values())]
        for stop in stored["float32"]
    ]
    return {"narrow sums": markdown(["tokens", "float64 (as it is)", *list(stored)[1:]], narrow)}


def _drift_row(name: str, growth: dict[str, Any], move: dict[str, float]) -> list[str]:
    errors = [*(growth["chunks"][stop] for stop in STOPS), growth["steps"]["10000"]]
    moves = [move.get(name) for name in ("steps", "float32")]
    return [f"`{name}`", *map(_scientific, errors), *map(_scientific, moves)]


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


def _scientific(error: float | None) -> str:
    """Two figures, such as 2.5e-7, 0.36 or 11."""
    if error is None:
        return MISSING
    return f"{error:.0f}" if error >= 10 else f"{error:#.2g}".replace("e-0", "e-")
