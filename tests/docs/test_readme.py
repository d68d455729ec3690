"""The README's picture of a kill and its first command, as they come out here."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import shell_lines
from tests.docs.pages import DOCS

pytestmark = pytest.mark.process

ROOT = DOCS.parent


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


def test_first_text_is_readable() -> None:
    """The command that the README shows first, with fewer tokens, writes text and no JSON."""
    (line,) = (line for line in shell_lines(ROOT / "README.md") if "everstream generate" in line)
    words = shlex.split(line)
    assert words[:2] == [".venv/bin/everstream", "generate"]
    done = subprocess.run(
        [sys.executable, "-m", "server.cli.main", *words[1:], "--max-tokens", "20", "--seed", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Once upon a time ")
    assert "{" not in done.stdout
