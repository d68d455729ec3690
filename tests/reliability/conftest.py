"""Fixtures of the proofs of reliability."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.reliability.sites import Site, site_of


@pytest.fixture(params=["server", pytest.param("replicas", marks=pytest.mark.database)])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    """One server, and three replicas."""
    async with site_of(request.param, tmp_path) as found:
        yield found
