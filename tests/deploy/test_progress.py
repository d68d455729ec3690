"""What is said while commands run, and what when one fails."""

from __future__ import annotations

import importlib.util
import subprocess
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "progress"


def load() -> Any:
    loader = SourceFileLoader("progress", str(SCRIPT))
    spec = importlib.util.spec_from_loader("progress", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "  [12/46] Building CXX object CMakeFiles/kernels_v3.dir/a/src/tiles_kernels.cpp.o",
            "12 of 46 compiled: tiles_kernels.cpp",
        ),
        ("[3/46] Linking CXX static library libnanobind-static.a", "3 of 46 compiled: libnanobind"),
        ("Collecting numpy>=2.0 (from -r /dev/stdin (line 6))", "package numpy"),
        ("  Downloading apsw-3.54-cp311-manylinux.whl (7 MB)", "package apsw"),
        ("Installing collected packages: a, b, c", "unpacking 3 packages"),
        ("base of smollm2: 40 of 93 MB", "smollm2: 40 of 93 MB"),
    ],
)
def test_line_has_what_was_said_last(said: str, shown: str) -> None:
    progress = load().Progress()
    progress.read("Looking in indexes")
    progress.read(said)
    assert shown in progress.line()


def test_base_that_is_there_is_not_shown() -> None:
    progress = load().Progress()
    progress.read("Collecting numpy")
    progress.read("base of smollm2: 40 of 93 MB")
    assert progress.line().endswith("package numpy, smollm2: 40 of 93 MB")
    progress.read("base of smollm2: 93 of 93 MB")
    assert progress.line().endswith("package numpy")


@pytest.mark.process
def test_commands_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for what the other one does first."""
    one, other = tmp_path / "one", tmp_path / "other"
    for pipe in (one, other):
        subprocess.run(["mkfifo", pipe], check=True)
    command = [SCRIPT, f"echo 1 >{one}; cat {other}", f"cat {one}; echo 2 >{other}"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


@pytest.mark.process
def test_command_that_fails_is_shown_with_its_status() -> None:
    done = subprocess.run(
        [SCRIPT, "echo fine", "echo the cause >&2; exit 3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "the cause\n")
