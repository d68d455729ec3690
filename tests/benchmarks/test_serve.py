"""The serving benchmark, our side alone: a real server, a real load, figures from raw rounds."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks.report import Figures
from benchmarks.serve import __main__ as serve
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


def test_program_ends_with_medians_of_its_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results.json"
    serve.main(
        f"--peers --size tiny --streams 1 3 --requests 2 --max-tokens 6 --rounds 2 --threads 1"
        f" --models {tmp_path} --output {output}".split()
    )
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads(output.read_text(encoding="utf-8"))
    assert last["ratios"] == {}
    (rows,) = last["servers"].values()
    for streams, figures in rows.items():
        assert len(figures["rounds"]) == 2
        for one in figures["rounds"]:
            assert one["tokens"] == int(streams) * 2 * 6
            assert one["tokens_per_s"] == pytest.approx(one["tokens"] / one["seconds"], rel=0.02)
        for name in COLUMNS:
            values = [one[name] for one in figures["rounds"] if one[name] is not None]
            wanted = pytest.approx(median(values), abs=0.002) if values else None
            assert figures[name] == wanted
        assert figures["ttft_p50_ms"] > 0 and figures["cpu_us_per_token"] >= 0
