"""Ollama's packages for Python and Node, and LangChain's and LlamaIndex's classes for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compat.conftest import serving
from tests.compat.environments import Client, node_client, python_client

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def client() -> Client:
    return python_client("ollama")


def test_the_python_packages_pass_their_checks(client: Client, environment: dict[str, str]) -> None:
    client.check(timeout_s=300, **environment)


def test_the_node_package_passes_its_checks(environment: dict[str, str]) -> None:
    node = node_client("ollama_node")
    options = ("--test", "--test-reporter=tap", "--test-concurrency=1")
    output = node.run(*options, "check_ollama.mjs", timeout_s=300, **environment)
    assert re.search(r"^# pass [1-9]", output, re.MULTILINE), output
    assert "# skipped 0" in output, output


def test_the_same_call_gives_the_same_text_over_a_kill(client: Client, tmp_path: Path) -> None:
    with (
        serving(tmp_path) as server,
        client.running("over_a_kill.py", EVERSTREAM_URL=server.url) as lines,
    ):
        assert next(lines) == "begun"
        server.restart()
        assert list(lines) == ["cut", "begun", "same"]
