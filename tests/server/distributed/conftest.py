"""One PostgreSQL for all tests of this folder, and an empty database for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def database_url(postgres: Postgres) -> str:
    return postgres.new_database()
