"""Output that cannot be written: in the terminal's encoding, to a full disk, to a closed pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
#: Commands that write to standard output: at once, at their end, and by typer alone.
COMMANDS = ["generate x\u00e9 --max-tokens 40 --threads 1", "inspect", "--version", "serve --help"]
FULL = "everstream: cannot write: No space left on device\n"


def started(command: str, **streams: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "server.cli.main", *command.split()],
        env=os.environ | {"PYTHONIOENCODING": "ascii:strict"},
        text=True,
        cwd=ROOT,
        **{"stderr": subprocess.PIPE, **streams},  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_full_disk_is_one_line(command: str) -> None:
    with open("/dev/full", "w") as full:
        process = started(command, stdout=full)
        assert process.communicate() == (None, FULL)
        assert process.returncode == 2
        process = started(command, stdout=full, stderr=full)
        assert process.wait() == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_reader_that_leaves_ends_the_command_in_silence(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = started(command, stdout=writing)
    os.close(writing)
    assert process.communicate() == (None, "")
    assert process.returncode == 1


def test_what_the_terminal_cannot_show_is_replaced() -> None:
    process = started(COMMANDS[0], stdout=subprocess.PIPE)
    output, errors = process.communicate()
    assert (process.returncode, output[:2]) == (0, "x?")
    assert "40 tokens" in errors and "Traceback" not in errors


def test_command_without_standard_output_ends_well() -> None:
    command = ["sh", "-c", 'exec "$0" -m server.cli.main --version >&-', sys.executable]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=True)
    assert done.stderr == ""
