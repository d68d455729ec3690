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
#: Head widths and deviations, and numbers of features of the table.
SETTINGS, WIDTHS = ((16, 0.5), (64, 0.5), (64, 1.0)), ("16", "64", "256", "1024")
#: Of what was read in chunks, the tokens after which the table has the error.
STOPS = ("1000", "1000000")
MISSING = "-"


def drift_table() -> str:
    """Of measurements.md: errors by the length of the stream."""
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


def kernel_tables() -> dict[str, str]:
    """Of docs/contribute/measurements.md: errors of features and of streams."""
    return {
        "kernel error": kernel_error_table(),
        "drift": drift_table(),
    }


def kernel_error_table() -> str:
    """Median errors of the attention output."""
    found = {(one["dim"], one["scale"]): one for one in _read("kernel_error")["settings"]}
    rows = []
    for dim, scale in SETTINGS:
        one = found[dim, scale]
        without = f"{one['without_features']['output']:.2f}"
        for kind, errors in one["errors"].items():
            medians = [f"{errors[width]['output']['median']:.2g}" for width in WIDTHS]
            rows.append([str(dim), f"{scale:g}", kind, *medians, without])
    return markdown(["K", "deviation", "features", *(f"m = {w}" for w in WIDTHS), "without"], rows)


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
