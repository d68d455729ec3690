"""The decode benchmark: figures follow from raw rounds, contenders answer over their pipe."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from benchmarks.decode import __main__ as decode
from benchmarks.decode.__main__ import arguments, points, takes_part
from benchmarks.decode.peers import CONTENDERS, Measured, Opened, Point, Unavailable, steps_until
from benchmarks.decode.report import Row, Turns, figures_of
from benchmarks.decode.roofline import Cost
from benchmarks.decode.worker import Worker, make, serve
from model.native.runtime import built

needs_native = pytest.mark.skipif(not built(), reason="the native runtime was not built")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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


def test_every_peer_takes_part_somewhere_and_ours_everywhere() -> None:
    found = points(arguments([]))
    for name in CONTENDERS:
        assert any(takes_part(name, point) for point in found), name
    assert all(takes_part(name, point) for name in ("gated", "elu", "llama") for point in found)


def test_steps_end_when_the_time_is_over() -> None:
    clock = iter([0.0, 1.0, 2.0, 3.5])
    assert steps_until(3.0, lambda: next(clock), lambda: None) == (3, 3.5)


class Moody:
    """Opens one stream, not two, and fails at three."""

    def open(self, point: Point) -> Opened:
        if point.streams == 2:
            raise Unavailable("two are too many")
        assert point.streams == 1, "three"
        return Opened("moody", 1, 1, Cost(2, 3))

    def run(self, seconds: float) -> Measured:
        return Measured(5, seconds)


def ask(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    answers = io.StringIO()
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    serve(Moody(), io.StringIO(lines), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_worker_reports_results_and_errors() -> None:
    one, two, three = (asdict(Point("S1", "float32", n, 0, 1)) for n in (1, 2, 3))
    answers = ask([{"open": one}, {"run": 0.5}, {"open": two}, {"open": three}])
    assert answers[0]["variant"] == "moody"
    assert answers[1] == {"tokens": 5, "seconds": 0.5}
    assert answers[2] == {"unavailable": "two are too many"}
    assert "three" in answers[3]["error"]


def test_contender_that_dies_is_an_error_with_its_log(tmp_path: Path) -> None:
    with Worker("nobody", tmp_path, 1) as worker, pytest.raises(RuntimeError, match="KeyError"):
        worker.open(POINT)


def test_gathered_runs_keep_the_best_bandwidth_and_no_rounds(tmp_path: Path) -> None:
    run, output = tmp_path / "run.json", tmp_path / "decode.json"
    contender = {"tokens_per_s": 5, "rounds": [1], "bandwidths": [2, 3]}
    rows = [{"size": "S1", "contenders": {"gated": contender}}]
    run.write_text(json.dumps({"machine": {}, "rounds": 1, "seconds": 1, "rows": rows}))
    decode.main(f"--gather {run} {run} --output {output}".split())
    (row, again) = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert row == again
    assert row["contenders"]["gated"] == {"tokens_per_s": 5, "bytes_per_s": 3}


def test_torch_decodes_and_prefills(tmp_path: Path) -> None:
    contender = make("eager", tmp_path)
    opened = contender.open(Point("tiny", "float32", 2, 0, 1))
    assert contender.run(0.0).tokens == opened.step_tokens == 2
    opened = contender.open(Point("tiny", "float32", 1, 0, 1, "prefill"))
    assert contender.run(0.0).tokens == opened.step_tokens == 512
    with pytest.raises(Unavailable, match="int8"):
        contender.open(Point("tiny", "int8", 1, 0, 1))


@needs_native
def test_program_ends_with_figures_that_follow_from_their_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "results.json"
    decode.main(
        f"--size tiny --only gated elu --dtype bfloat16 --streams 1 3 --contexts 0 600 --threads 1"
        f" --rounds 2 --seconds 0.01 --all --models {tmp_path} --output {output}".split()
    )
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads(output.read_text(encoding="utf-8"))
    where = [(row["mode"], row["streams"], row["context"]) for row in last["rows"]]
    assert where == [
        *(("decode", 1, 0), ("decode", 1, 600), ("decode", 3, 0), ("decode", 3, 600)),
        ("prefill", 1, 0),
    ]
    for row in last["rows"]:
        assert row["contenders"].keys() == {"gated", "elu"}
        assert not row["skipped"]
        for figures in row["contenders"].values():
            rates = [one["tokens"] / one["seconds"] for one in figures["rounds"]]
            assert len(rates) == len(figures["bandwidths"]) == 2
            assert figures["tokens_per_s"] == pytest.approx(median(rates), rel=1e-3)
            assert all(one["tokens"] % figures["step_tokens"] == 0 for one in figures["rounds"])
            limit_s = max(
                figures["step_bytes"] / max(figures["bandwidths"]),
                figures["step_operations"] / figures["operations_per_s"],
            )
            fraction = limit_s * median(rates) / figures["step_tokens"]
            assert figures["fraction"] == pytest.approx(fraction, rel=1e-2)
