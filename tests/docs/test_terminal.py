"""The commands of docs/use/terminal.md, as they stand there, against a real server."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clients.chat.conversation import HELP
from server.cli.main import app
from tests.docs.pages import DOCS
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.process

PAGE = (DOCS / "use/terminal.md").read_text("utf-8")
COMMANDS = re.findall(r"(?m)^    everstream (.*)$", PAGE)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ServerProcess("--max-sessions", 20) as process:
        yield f"http://127.0.0.1:{process.port}"


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith("bench")])
def test_bench_runs_as_written(server: str, command: str) -> None:
    result = CliRunner().invoke(app, [*shlex.split(command), "--url", server])
    assert result.exit_code == 0, result.output
    levels = json.loads(result.output.splitlines()[-1])["levels"]
    assert len(levels) == 3
    assert all(level["tokens"] > 0 and level["errors"] == 0 for level in levels)


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith("chat")])
def test_chat_runs_as_written(server: str, tmp_path: Path, command: str) -> None:
    words = [word for word in shlex.split(command) if not word.startswith(("--url", "http"))]
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    for _ in range(2):
        result = CliRunner().invoke(
            app, [*words, "--url", server], "/tokens 3\nOnce\n/history\n", env=environment
        )
        assert result.exit_code == 0, result.output
        assert "tokens/s" in result.output
    num_turns = 2 if "--session" in words else 1
    assert f"\n{num_turns:>3}  " in result.output
    assert f"\n{num_turns + 1:>3}  " not in result.output


def test_every_command_of_the_chat_is_on_the_page() -> None:
    for name in re.findall(r"(?m)^  (/[a-z-]+)", HELP):
        assert f"`{name}" in PAGE, name


def test_generate_runs_as_written() -> None:
    (command,) = (one for one in COMMANDS if one.startswith("generate"))
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Once upon a time")
    assert "40 tokens" in result.stderr
