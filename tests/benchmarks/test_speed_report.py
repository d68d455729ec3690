"""Speed results: gathering, the verdict on a target, the best of several runs, the plot."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.speed_report.__main__ import plot
from benchmarks.speed_report.results import best, gather, read
from benchmarks.speed_report.targets import Target


def test_missed_target_says_how_much_of_it_was_reached() -> None:
    assert Target("speed", "2x", "2.00x", 1.0).verdict == "reached"
    assert "75%" in Target("speed", "2x", "1.50x", 0.75).verdict
    assert "99%" in Target("speed", "2x", "2.00x", 0.999).verdict


def test_gathered_runs_keep_the_best_bandwidth_and_no_rounds(tmp_path: Path) -> None:
    run = tmp_path / "run.json"
    contender = {"tokens_per_s": 5, "rounds": [1], "bandwidths": [2, 3]}
    rows = [{"size": "S1", "contenders": {"gated": contender}}]
    run.write_text(json.dumps({"machine": {}, "rounds": 1, "seconds": 1, "rows": rows}))
    (row, again) = gather([run, run])["rows"]
    assert row == again
    assert row["contenders"]["gated"] == {"tokens_per_s": 5, "bytes_per_s": 3}


def test_plot_is_written(tmp_path: Path) -> None:
    plot(read()["decode"]["rows"], tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_best_looks_at_no_more_threads_than_it_may() -> None:
    rows = [
        {"threads": threads, "contenders": {"llama": {"tokens_per_s": rate}}}
        for threads, rate in ((1, 10.0), (2, 30.0))
    ]
    assert [one.rate for n in (1, 2) if (one := best(rows, ("llama",), n))] == [10.0, 30.0]
    assert best(rows, ("gated",), 2) is None
