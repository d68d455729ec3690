"""What all commands have in common: their help, and one line for what a user can put right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer import Context
from typer.main import get_group
from typer.testing import CliRunner, Result

from server.cli.main import COMMANDS, EXTRAS, GROUPS, app

GROUP = get_group(app)
NAMES = sorted({*GROUP.list_commands(Context(GROUP)), *COMMANDS})
RUNNABLE = [name for name in NAMES if name not in GROUPS]
ROOT = Path(__file__).parents[3]


def run(*words: object, **variables: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env=variables or None)


def the_line(result: Result) -> str:
    """The one line that a failed command has said."""
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    assert line.startswith("everstream: "), line
    return line


@pytest.mark.parametrize("command", [*NAMES, ""])
def test_help_is_plain_and_fits_eighty_columns(command: str) -> None:
    result = run(*command.split(), "--help", TERMINAL_WIDTH="80")
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert result.stdout.isascii()
    assert "<bool>" not in result.stdout
    assert "\\[" not in result.stdout
    assert not re.search(r"(?m)[^]]\.\.\.$", result.stdout), (
        "a command's first sentence is too long"
    )


@pytest.mark.parametrize("command", RUNNABLE)
def test_every_option_has_help(command: str) -> None:
    group: Any = GROUP
    for word in command.split():
        group = group.get_command(Context(group), word)
    assert [option.name for option in group.params if not option.help] == []


def test_version_is_printed() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"everstream {version('everstream')}\n")


@pytest.mark.parametrize("command", RUNNABLE)
def test_unknown_option_is_one_line(command: str) -> None:
    line = the_line(run(*command.split(), "--nonsense"))
    assert "--nonsense" in line
    assert f"everstream {command} --help'" in line


def test_unknown_command_is_one_line() -> None:
    assert "'nonsense'" in the_line(run("nonsense"))


@pytest.mark.parametrize("words", [[], ["store"]])
def test_no_command_shows_the_help(words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert "Commands:" in result.output


NEED_TORCH = {
    "train": ["--data", ROOT / "README.md", "--out", "OUT"],
    "export": ["everstream-stories", "OUT"],
    "convert": [
        *("--from", "everstream-stories", "--to", "performer", "--out", "OUT"),
        *("--data", ROOT / "README.md", "--valid", ROOT / "README.md"),
    ],
}


@pytest.mark.process
@pytest.mark.parametrize("command", NEED_TORCH)
def test_package_of_an_extra_that_is_missing_is_one_line(command: str, tmp_path: Path) -> None:
    """In a process in which torch cannot be found."""
    hide = "import sys; sys.modules['torch'] = None; from server.cli.main import app; app()"
    words = [str(w).replace("OUT", str(tmp_path / "out")) for w in NEED_TORCH[command]]
    done = subprocess.run(
        [sys.executable, "-c", hide, command, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "everstream: this needs torch, which is not installed: pip install 'everstream[train]'\n"
    )


def test_every_extra_that_is_named_exists() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert all(re.search(rf"(?m)^{extra} = \[", text) for extra in EXTRAS.values())
