from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.harness import Running, running


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    """A server with default settings."""
    async with running() as started:
        yield started
