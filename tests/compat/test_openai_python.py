"""OpenAI's package for Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.conftest import serving
from tests.compat.environments import Client, python_client

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def client() -> Client:
    return python_client("openai")


def test_the_python_package_finds_all_that_it_asks_for(
    client: Client, environment: dict[str, str]
) -> None:
    client.check(timeout_s=300, **environment)


def test_the_python_package_goes_on_by_itself_after_a_restart(
    client: Client, tmp_path: Path
) -> None:
    with (
        serving(tmp_path) as server,
        client.running("over_a_restart.py", EVERSTREAM_URL=server.url) as lines,
    ):
        assert next(lines) == "ready"
        assert server.stop() == 0
        server.start()
        assert list(lines) == ["closed 1012", "went on"]
