"""OpenAI's package for Node."""

from __future__ import annotations

import re

import pytest

from tests.compat.environments import node_client


@pytest.mark.timeout(400)
def test_the_node_package_passes_its_checks(environment: dict[str, str]) -> None:
    client = node_client("node")
    files = sorted(path.name for path in client.folder.glob("check_*.mjs"))
    options = ("--test", "--test-reporter=tap", "--test-concurrency=1")
    output = client.run(*options, *files, timeout_s=300, **environment)
    assert re.search(r"^# pass [1-9]", output, re.MULTILINE), output
    assert "# skipped 0" in output, output
