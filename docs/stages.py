"""Draws the life of a kept session into the page on the architecture: ``python -m docs.stages``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report import markdown, with_tables
from server.engine.session import TRANSITIONS, Stage

PAGE = Path(__file__).resolve().parent / "contribute" / "architecture.md"


def drawn(page: str) -> str:
    """``page`` with the table of today."""
    return with_tables(page, {"stages": markdown(["stage", "event: next stage"], _rows(), "---")})


def _rows() -> list[list[str]]:
    names = {stage: stage.name.lower() for stage in Stage}
    ways = {
        stage: ", ".join(
            f"{event.name.lower()}: {names[after]}"
            for (before, event), after in TRANSITIONS.items()
            if before is stage
        )
        for stage in Stage
    }
    return [[f"`{names[stage]}`", ways[stage].replace("_", " ")] for stage in Stage]


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
