"""What docs/use/clients-python.md and the package's own page show, as a user would run it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.standalone import CLIENT, ROOT, Standalone, python_blocks
from tests.docs.blocks import blocks_of
from tests.docs.pages import DOCS, page
from tests.reliability.servers import ServerProcess

pytestmark = pytest.mark.process

GUIDE = page("clients-python.md")
README = (CLIENT / "README.md").read_text("utf-8")
BLOCKS = python_blocks(GUIDE) + python_blocks(README)
EXAMPLES = DOCS / "use" / "examples.md"
COMMANDS = [
    command
    for text in (GUIDE, page("examples.md"))
    for command in re.findall(r"(?m)^python (-m clients\.examples\..*)$", text)
    if "examples.follow" not in command
]
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with ServerProcess("--threads", 1, "--max-sessions", 20) as process:
        yield process.url


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Standalone:
    return Standalone(tmp_path_factory.mktemp("standalone"))


def test_pages_have_what_is_tested() -> None:
    assert (len(python_blocks(GUIDE)), len(python_blocks(README)), len(COMMANDS)) == (9, 2, 4)
    assert "pip install ./clients/python" in GUIDE
    assert "pip install ./clients/python" in README


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs_where_only_the_client_is(
    standalone: Standalone, server_url: str, number: int
) -> None:
    assert ADDRESS in BLOCKS[number]
    standalone.run(BLOCKS[number].replace(ADDRESS, server_url))


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs_as_written(server_url: str, command: str) -> None:
    words = [sys.executable, *shlex.split(command), "--url", server_url]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") > 2


def test_line_that_is_added_to_the_followed_file_is_printed(
    server_url: str, tmp_path: Path
) -> None:
    follow, add = (
        block.text.replace("story.txt", str(tmp_path / "story.txt"))
        for block in blocks_of(EXAMPLES)
        if "story.txt" in block.text
    )
    prepare, command = follow.splitlines()
    subprocess.run(["bash", "-ec", prepare], check=True)
    words = [sys.executable, *shlex.split(command)[1:], "--url", server_url]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "waiting for more lines" in process.stderr.readline()
        subprocess.run(["bash", "-ec", add], check=True)
        assert "zq#7" in process.stdout.readline()
        process.kill()


def test_package_brings_nothing_of_the_server(standalone: Standalone) -> None:
    code = """
import importlib.util
import sys
import everstream_client
print(everstream_client.__file__)
for name in ("server", "model", "clients", "torch", "numpy"):
    assert importlib.util.find_spec(name) is None, name
"""
    assert not Path(standalone.run(code).strip()).is_relative_to(ROOT)


def test_package_exports_what_it_does_in_the_repository(standalone: Standalone) -> None:
    from clients import python

    code = "import everstream_client; print(everstream_client.__all__)"
    assert standalone.run(code).strip() == str(python.__all__)
