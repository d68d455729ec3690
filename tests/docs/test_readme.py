"""What the README says of sessions, and its picture of a kill, as they come out here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.speed_report.results import read
from benchmarks.speed_report.tables import comparison_cells
from tests.docs.pages import DOCS, rows, section

pytestmark = pytest.mark.process

ROOT = DOCS.parent
COMPARISON = rows(section((ROOT / "README.md").read_text(encoding="utf-8"), "How it compares"))


def test_speed_is_that_of_the_committed_results() -> None:
    (row,) = [row for row in COMPARISON if row[0].startswith("tokens/s")]
    assert row[1:3] == comparison_cells(read()["decode"]["rows"])


def test_stream_of_the_picture_survives_the_kill(tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    command = [sys.executable, "-m", "docs.kill_and_resume", str(picture)]
    done = subprocess.run(
        [*command, "--max-tokens", "40", "--kill-at", "20"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    drawn = picture.read_text(encoding="utf-8")
    assert "token&#160;20" in drawn
    assert "http" not in drawn.replace('xmlns="http://www.w3.org/2000/svg"', "")
