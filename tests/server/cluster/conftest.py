"""An empty database for each test."""

from __future__ import annotations

import pytest

from tests.postgres import Postgres


@pytest.fixture
def database_url(postgres: Postgres) -> str:
    return postgres.new_database()
