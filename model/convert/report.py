"""What a conversion shows: ``report.json``, a table, and a plot of the way back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STAGES = {
    "original": "the model before",
    "swapped": "after the bare swap",
    "matched": "after matching the layers",
    "fine_tuned": "after fine-tuning",
}


@dataclass(frozen=True)
class ConversionReport:
    """``bits_per_byte`` has the four stages; ``curve`` is (tokens of recovery, bits per byte).

    ``match_error`` is, per layer, the relative squared error of the attention's
    output at the first and at the last step of matching.
    """

    source: str
    attention: str
    attention_options: dict[str, Any]
    original_attention: str
    parameters: int
    fresh_tensors: list[str]
    window: int
    match_tokens: int
    fine_tune_tokens: int
    match_error: list[tuple[float, float]]
    bits_per_byte: dict[str, float]
    curve: list[tuple[int, float]]

    def save(self, out: Path) -> None:
        """Writes ``report.json`` and, where matplotlib is there, ``recovery.png`` into ``out``."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (out / "report.json").write_text(text, encoding="utf-8")
        self._plot(out / "recovery.png")

    def print(self, console: Console) -> None:
        """The four stages with the tokens seen until then."""
        table = Table("stage", "tokens", "bits per byte", "to the original")
        total = self.match_tokens + self.fine_tune_tokens
        seen = {"original": 0, "swapped": 0, "matched": self.match_tokens, "fine_tuned": total}
        original = self.bits_per_byte["original"]
        for stage, value in self.bits_per_byte.items():
            change = f"{value - original:+.4f}"
            table.add_row(STAGES[stage], f"{seen[stage]:,}", f"{value:.4f}", change)
        console.print(table)

    def _plot(self, path: Path) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return  # the plot needs the extra 'train'; report.json holds the same numbers
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="tokens of recovery", ylabel="bits per byte")
        original = self.bits_per_byte["original"]
        axes.axhline(original, color="tab:gray", linestyle="--", label=STAGES["original"])
        axes.plot(*zip(*self.curve, strict=True), color="tab:blue", marker=".", zorder=1)
        total = self.match_tokens + self.fine_tune_tokens
        places = {"swapped": 0, "matched": self.match_tokens, "fine_tuned": total}
        for stage, tokens in places.items():
            if stage in self.bits_per_byte:
                axes.scatter([tokens], [self.bits_per_byte[stage]], label=STAGES[stage], zorder=2)
        axes.set_title(f"{self.original_attention} to {self.attention}")
        axes.legend()
        figure.savefig(path, dpi=120)
