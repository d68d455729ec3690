"""The page has the figures of the committed file."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.store_latency import ROUND_TRIPS_MS, table

ROOT = Path(__file__).parents[2]


def test_page_has_the_figures_of_the_file() -> None:
    found = json.loads((ROOT / "benchmarks/results/store_latency.json").read_text())
    assert [int(ms) for ms in found] == [*ROUND_TRIPS_MS]
    assert table(found) in (ROOT / "docs/scale.md").read_text()
