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
from tests.docs.pages import DOCS
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.process

ROOT = DOCS.parent
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("clients/*/README.md")])
PAGES += sorted(ROOT.glob("model/bundled/README.md"))
SHELL = r"(?ms)^```(?:sh|bash)\n(.*?)^```"
ADDRESS = "http://127.0.0.1:8000"
#: Blocks that only ask the server something, and need nothing from other blocks.
ASKING = [
    (path.name, block)
    for path in PAGES
    for block in re.findall(SHELL, path.read_text("utf-8"))
    if block.startswith("curl ") and block.count("curl ") == 1 and "$ID" not in block
]


def shell_lines(text: str) -> Iterator[str]:
    """The commands in fenced blocks and in indented ones, continued lines as one."""
    for block in re.findall(SHELL, text):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"(?m)^    (\S.*)$", text)


def commands() -> list[tuple[str, str]]:
    """Every `everstream ...` on a page that begins a line."""
    found = []
    for path in PAGES:
        for line in shell_lines(path.read_text("utf-8")):
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
        name = words.pop(0)
        command = command.get_command(Context(command), name)  # type: ignore[assignment]
        assert command is not None, f"{page}: there is no command {name}"
    known = {flag for option in command.params for flag in option.opts}
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= known | {"--help"}, page


def test_pages_have_commands_and_questions() -> None:
    assert {"README.md", "convert.md", "first-chat.md", "terminal.md"} <= {p for p, _ in commands()}
    assert {"README.md", "chat.md", "responses.md"} <= {page for page, _ in ASKING}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = tmp_path_factory.mktemp("store")
    with ServerProcess("--max-sessions", 20, "--store", store) as process:
        yield f"http://127.0.0.1:{process.port}"


@pytest.mark.parametrize(("page", "block"), ASKING)
def test_curl_commands_are_answered(page: str, block: str, server: str, tmp_path: Path) -> None:
    assert ADDRESS in block, page
    done = subprocess.run(
        [
            "bash",
            "-ec",
            block.replace(ADDRESS, server).replace("curl ", "curl --silent --fail ", 1),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
