"""Anthropic's package for Node."""

from __future__ import annotations

import re

import pytest

from tests.compat.environments import node_client


@pytest.mark.timeout(400)
def test_the_anthropic_node_package_passes_its_checks(environment: dict[str, str]) -> None:
    client = node_client("anthropic_node")
    files = sorted(path.name for path in client.folder.glob("check_*.mjs"))
    output = client.run("--test", "--test-reporter=tap", *files, timeout_s=300, **environment)
    assert re.search(r"^# pass [1-9]", output, re.MULTILINE), output
    assert "# skipped 0" in output, output
