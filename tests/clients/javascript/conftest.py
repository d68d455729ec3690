"""Node with the client's development packages, and a proxy that cuts connections."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.clients.javascript.cutter import cutting
from tests.exclusive import exclusive

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
CLIENT = ROOT / "clients" / "javascript"
OLDEST_NODE = 18


@dataclass(frozen=True)
class Node:
    """Node and npm as they are installed."""

    node: str
    npm: str

    def run(self, *arguments: str | Path, folder: Path = HERE, **environment: str) -> str:
        """Runs node; its output, where it ends well."""
        return succeed([self.node, *map(str, arguments)], folder, environment)

    def run_npm(self, *arguments: str, folder: Path = CLIENT) -> str:
        """Runs npm, which asks nothing and counts nothing."""
        quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
        return succeed([self.npm, *arguments, *quiet], folder, {})

    def test(self, file: str, **environment: str) -> None:
        """Runs the tests of a file of this folder."""
        command = [self.node, "--test", "--test-reporter=tap", file]
        output = succeed(command, HERE, environment)
        found = re.search(r"^# pass (\d+)$", output, re.MULTILINE)
        assert found, output
        assert int(found[1]) > 10, output
        assert "# skipped 0" in output, output


def succeed(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def node() -> Node:
    """Fails, and does not skip, where Node is missing: a skip would go unnoticed."""
    found = {name: shutil.which(name) for name in ("node", "npm")}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        pytest.fail(
            f"the JavaScript client cannot be tested without {' and '.join(missing)} (Debian: "
            "apt-get install nodejs npm); --ignore=tests/clients/javascript leaves it out"
        )
    node = Node(str(found["node"]), str(found["npm"]))
    version = node.run("--version")
    assert int(version.removeprefix("v").split(".")[0]) >= OLDEST_NODE, version
    installed = CLIENT / "node_modules" / ".package-lock.json"
    lock = CLIENT / "package-lock.json"
    with exclusive(CLIENT):
        if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
            node.run_npm("ci", "--ignore-scripts")
    return node


@pytest.fixture
def proxy_url(server_url: str) -> Iterator[str]:
    """The server's address behind a proxy; see `CuttingProxy` for the paths that it knows."""
    port = urlsplit(server_url).port
    assert port is not None
    with cutting(port) as proxy:
        yield f"http://127.0.0.1:{proxy.port}"
