"""The serving benchmark: ratios and medians of its rounds."""

from __future__ import annotations

from benchmarks.report import Figures
from benchmarks.serve.__main__ import COLUMNS, medians, ratios


def test_ratio_is_ours_by_theirs_at_the_same_number_of_streams() -> None:
    rows = {
        "everstream": {1: {"tokens_per_s": 30.0}, 8: {"tokens_per_s": 100.0}},
        "llama": {1: {"tokens_per_s": 10.0}, 8: {"tokens_per_s": 80.0}},
    }
    assert ratios(rows) == {"llama": {1: 3.0, 8: 1.25}}


def test_median_leaves_out_what_was_not_measured() -> None:
    runs: list[Figures] = [dict.fromkeys(COLUMNS, value) for value in (3.0, 1.0, 2.0)]
    runs[0]["itl_p50_ms"] = None
    found = medians(runs)
    assert found["tokens_per_s"] == 2.0
    assert found["itl_p50_ms"] == 1.5
    assert found["rounds"] == runs
