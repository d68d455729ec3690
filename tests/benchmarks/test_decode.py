"""The decode benchmark: figures follow from raw rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.decode import __main__ as decode
from benchmarks.decode.__main__ import arguments, points, takes_part
from benchmarks.decode.peers import CONTENDERS, Measured, Opened, Point, steps_until
from benchmarks.decode.report import Row, Turns, figures_of
from benchmarks.decode.roofline import Cost
from model.native.runtime import DTYPES

POINT = Point("S1", "bfloat16", streams=2, context=0, threads=1)


def turns(*tokens_per_s: float) -> Turns:
    """Rounds of two seconds; a step of two tokens moves 100 bytes and computes 1."""
    rounds = [Measured(round(2 * rate), 2.0) for rate in tokens_per_s]
    opened = Opened("", 7, step_tokens=2, cost=Cost(100, 1))
    return Turns(opened, 1e9, rounds, bandwidths=[500.0, 1000.0, 800.0])


def test_figure_is_the_median_of_the_rounds() -> None:
    one = turns(10.0, 30.0, 20.0)
    assert one.tokens_per_s == 20.0
    assert one.spread == 1.0


def test_fraction_is_of_the_best_bandwidth() -> None:
    one = turns(10.0)  # two tokens in 0.2 s, where 100 bytes may pass in 0.1 s
    assert one.limit.bytes_per_s == 1000.0
    assert one.fraction == pytest.approx(0.5)


def test_ratio_is_the_first_of_ours_by_the_peer() -> None:
    row = Row(POINT, {"gated": turns(30.0), "elu": turns(50.0), "llama": turns(10.0)})
    assert row.ratio("llama") == 3.0
    assert figures_of(row)["ratios"] == {"llama": 3.0}
    assert Row(POINT, {"llama": turns(10.0)}).ratio("llama") is None


def test_points_of_one_number_of_threads_come_together() -> None:
    found = points(arguments([]))
    threads = [point.threads for point in found]
    assert threads == sorted(threads)
    assert len(set(found)) == len(found)


def test_every_dtype_is_one_that_the_runtime_has() -> None:
    assert set(arguments([]).dtype) <= set(DTYPES)


def test_every_peer_takes_part_somewhere_and_ours_everywhere() -> None:
    found = points(arguments([]))
    for name in CONTENDERS:
        assert any(takes_part(name, point) for point in found), name
    assert all(takes_part(name, point) for name in ("gated", "elu", "llama") for point in found)


def test_steps_end_when_the_time_is_over() -> None:
    clock = iter([0.0, 1.0, 2.0, 3.5])
    assert steps_until(3.0, lambda: next(clock), lambda: None) == (3, 3.5)


def test_gathered_runs_keep_the_best_bandwidth_and_no_rounds(tmp_path: Path) -> None:
    run, output = tmp_path / "run.json", tmp_path / "decode.json"
    contender = {"tokens_per_s": 5, "rounds": [1], "bandwidths": [2, 3]}
    rows = [{"size": "S1", "contenders": {"gated": contender}}]
    run.write_text(json.dumps({"machine": {}, "rounds": 1, "seconds": 1, "rows": rows}))
    decode.main(f"--gather {run} {run} --output {output}".split())
    (row, again) = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert row == again
    assert row["contenders"]["gated"] == {"tokens_per_s": 5, "bytes_per_s": 3}
