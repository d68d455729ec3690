"""What drafts gain: by text and shape in docs/contribute/native.md, of heads in qwen3.5.md."""

from __future__ import annotations

from benchmarks.report import RESULTS, Figures, markdown, read_result

TEXTS = ("plain text", "rewritten text", "JSON under a schema")


def tables() -> dict[str, str]:
    """By the name of its marks."""
    rows = []
    for name, figures in read_result(RESULTS / "speculation.json")["shapes"].items():
        calls = figures["call_ms"]
        relative = ", ".join(f"{call / calls[0]:.2f}" for call in calls[1:])
        gains = [_gain(figures[text]) if text in figures else "" for text in TEXTS]
        rows.append((name, relative, *gains))
    head = ("shape, weights, streams", "a call of 2, 4, 8, 16 rows", *TEXTS)
    return {"speculation": markdown(head, rows)}


def head_tables() -> dict[str, str]:
    """Of a multi-token head, by the name of its marks."""
    rows = []
    for model, found in read_result(RESULTS / "multi_token_head.json")["speeds"].items():
        calls = found["call_ms"]
        draft = f"{found['draft_ms'] / calls[0]:.2f}"
        for name, figures in found.items():
            if isinstance(figures, dict):
                rows.append((f"{model}, {name}", f"{figures['right']:.2f}", draft, _gain(figures)))
    head = ("model, head", "first drafts that are right", "a draft, in tokens", "speed")
    return {"multi-token head": markdown(head, rows)}


def _gain(figures: Figures) -> str:
    """The median, and the rounds that were furthest from it."""
    ratios = figures["speedups"]
    return f"**{figures['speedup']:.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
