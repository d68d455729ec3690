"""The shell commands of every page and README: the flags that they use, and what curl asks.

Commands that other tests run are read here as well: a flag that was renamed shows at once.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer import Context
from typer.main import get_group

from server.cli.main import app
from tests.docs.blocks import ROOT, USERS_PAGES, shell_lines
from tests.docs.pages import DOCS
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.process

PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("clients/*/README.md")])
PAGES += sorted(ROOT.glob("model/bundled/README.md"))
ADDRESS = "http://127.0.0.1:8000"
#: What a reader puts in, and what other blocks have made.
PLACEHOLDERS = ("ADMIN_KEY", "$ID", "sess_...")
#: With a server that was started in a way of its own: test_chat.py and test_operators.py ask it.
ELSEWHERE = ("reasoning_effort", '"state": "assistant"')


def asking() -> list[tuple[str, str]]:
    """Commands that only ask the server something, and need nothing from other blocks."""
    elsewhere = (*PLACEHOLDERS, *ELSEWHERE)
    return [
        (path.name, line)
        for path in PAGES
        for line in shell_lines(path)
        if line.startswith("curl ") and not any(words in line for words in elsewhere)
    ]


def commands() -> list[tuple[str, str]]:
    """Every `everstream ...` on a page that begins a line."""
    found = []
    for path in PAGES:
        for line in shell_lines(path):
            plain = re.sub(r"\s+#.*", "", line)
            match = re.match(r"(?:\S*/bin/)?everstream ([a-z].*)", plain)
            if match:
                found.append((path.name, match[1]))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_command_and_its_flags_exist(page: str, line: str) -> None:
    words = shlex.split(line.partition("|")[0].partition(">")[0].rstrip("& "))
    command = get_group(app)
    while hasattr(command, "get_command"):
        if not words:
            assert getattr(command, "invoke_without_command", False), page
            break
        name = words.pop(0)
        command = command.get_command(Context(command), name)  # type: ignore[assignment]
        assert command is not None, f"{page}: there is no command {name}"
    known = {flag for option in command.params for flag in option.opts}
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= known | {"--help"}, page


INSTALLS = [
    (path.name, line)
    for path in USERS_PAGES
    for line in shell_lines(path)
    if re.search(r"pip install .*(?<=['\s])(\.|everstream-)", line) and "clients/python" not in line
]


@pytest.mark.parametrize(("page", "line"), INSTALLS)
def test_installs_of_everstream_have_tested_versions(page: str, line: str) -> None:
    assert "--constraint constraints.txt" in line


def test_a_service_is_not_installed_without_the_native_runtime() -> None:
    (line,) = (line for page, line in INSTALLS if page == "deploy.md")
    assert "EVERSTREAM_REQUIRE_NATIVE=1" in line


def test_pages_have_commands_and_questions() -> None:
    assert {"README.md", "convert.md", "first-chat.md", "terminal.md"} <= {p for p, _ in commands()}
    assert {"README.md", "chat.md", "structured-output.md"} <= {page for page, _ in asking()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = tmp_path_factory.mktemp("store")
    with ServerProcess("--max-sessions", 20, "--store", store) as process:
        yield f"http://127.0.0.1:{process.port}"


@pytest.mark.parametrize(("page", "line"), asking())
def test_curl_commands_are_answered(page: str, line: str, server: str, tmp_path: Path) -> None:
    assert ADDRESS in line, page
    asked = line.replace(ADDRESS, server).replace("curl ", "curl --silent --fail ", 1)
    done = subprocess.run(
        ["bash", "-ec", asked],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
