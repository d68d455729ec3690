"""The long form: ``pytest tests/chaos --long``."""

from __future__ import annotations

import pytest


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether this run has the time for every case."""
    return bool(request.config.getoption("--long"))
