from __future__ import annotations

from pathlib import Path

import pytest

from model.training.report import Report


def write(report: Report, steps: range) -> None:
    for step in steps:
        report.step(step, 10 * step, 0.5 * step, 4.0, 1.0, 0.3, 100.0)


def test_resumed_run_shows_its_last_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Report(tmp_path, 0, 100, [Path("valid.txt")])
    write(first, range(1, 41))
    first.evaluation(40, [1.9431])
    first.close()
    second = Report(tmp_path, 40, 100, [Path("valid.txt")])
    write(second, range(41, 51))
    second.close()
    assert "valid 1.9431 bits/byte" in capsys.readouterr().out.splitlines()[-1]


def test_log_drops_steps_after_the_save_and_half_a_row(tmp_path: Path) -> None:
    first = Report(tmp_path, 0, 100)
    write(first, range(1, 8))
    first.close()
    log = tmp_path / "log.csv"
    log.write_text(log.read_text(encoding="utf-8") + "3,30,1.", encoding="utf-8")
    Report(tmp_path, 5, 100).close()
    rows = log.read_text(encoding="utf-8").splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["1", "2", "3", "4", "5"]
