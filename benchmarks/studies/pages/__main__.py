"""Writes the figures of the committed results into the pages.

``python -m benchmarks.studies.pages`` puts each table between its marks, each figure into its
sentence, and draws the plot of docs/background/speed.md; a test compares pages and results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.checkpoints import published
from benchmarks.process import ROOT
from benchmarks.report import with_tables
from benchmarks.studies.pages import (
    background,
    bundled,
    comparison,
    constant_state,
    linearized,
    models,
    peers,
    quantization,
    scale,
    speculation,
    speed,
    training,
)

#: What makes the tables of a page; a page without any has figures in sentences.
PAGES: dict[str, Callable[[], dict[str, str]]] = {
    "README.md": models.readme_tables,
    "docs/contribute/comparison-tables.md": comparison.tables,
    "docs/background/comparison.md": comparison.summary,
    "docs/background/published-attention.md": linearized.tables,
    "docs/contribute/convert.md": background.conversion_tables,
    "docs/start/models.md": models.size_tables,
    "docs/models/arwkv.md": partial(published.tables, "arwkv7"),
    "docs/models/lfm3.md": partial(published.tables, "lfm3"),
    "docs/models/lfm2.md": lambda: published.tables("lfm2") | models.family_summary("lfm2"),
    "docs/contribute/convert-llama.md": constant_state.tables,
    "docs/models/llama.md": lambda: models.llama_tables() | constant_state.oracle_tables(),
    "model/bundled/smollm2/README.md": constant_state.summary,
    "docs/models/mamba.md": models.mamba_tables,
    "docs/models/mamba2-hybrids.md": models.mamba2_hybrid_tables,
    "docs/models/qwen3.5.md": lambda: models.qwen35_tables() | speculation.head_tables(),
    "docs/models/rwkv7.md": models.tables,
    "docs/contribute/model.md": quantization.tables,
    "docs/contribute/native.md": speculation.tables,
    "docs/operate/sizing.md": dict,
    "docs/reference/protocol.md": dict,
    "docs/background/replicas.md": scale.tables,
    "docs/background/peers.md": peers.tables,
    "docs/background/speed.md": speed.tables,
    "docs/background/streams.md": background.drift_tables,
    "docs/contribute/measurements.md": lambda: {
        name: table
        for tables in (
            speed.full_tables,
            models.full_tables,
            scale.full_tables,
        )
        for name, table in tables().items()
    },
    "docs/contribute/training.md": training.tables,
}


def rendered(page: str) -> str:
    """The text of ``page`` with the figures of now."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return bundled.filled(page, with_tables(text, PAGES[page]()))


def main() -> None:
    """Writes every page, and the plot."""
    for page in PAGES:
        (ROOT / page).write_text(rendered(page), encoding="utf-8")
    speed.plot()


if __name__ == "__main__":
    main()
