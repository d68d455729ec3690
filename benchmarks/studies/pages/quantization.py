"""The table of docs/contribute/model.md: what each precision costs, by model."""

from __future__ import annotations

from benchmarks.report import RESULTS, markdown, read_result


def tables() -> dict[str, str]:
    """By the name of its marks."""
    rows = []
    for name, model in read_result(RESULTS / "quantization.json")["models"].items():
        for form, figures in model["forms"].items():
            size = f"{figures['bytes'] / 1e6:.2f}" if "bytes" in figures else ""
            bits = f"{figures['bits_per_byte']:.4f}"
            loss = round(figures["loss"], 4) + 0.0  # no negative zero
            rows.append((name, form, bits, f"{loss:+.4f}", size))
    head = ("model", "weights", "bits per byte", "more than float32", "MB of the file")
    return {"quantization": markdown(head, rows)}
