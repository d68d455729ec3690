"""A server on the fake engine, or an empty database, for each test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.postgres import Postgres
from tests.server.harness import Running, running


@pytest.fixture
def database_url(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running() as started:
        yield started
