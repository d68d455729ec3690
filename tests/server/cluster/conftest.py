"""An empty database for each test, and stores in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from server.store.postgres.store import PostgresStore
from tests.postgres import Postgres
from tests.s3_server import S3Server
from tests.server.cluster.stores import Join, shared_place


@pytest.fixture
def database_url(postgres: Postgres) -> str:
    return postgres.new_database()


def _started() -> Iterator[S3Server]:
    server = S3Server()
    server.start()
    yield server
    server.close()


#: The first is shared by a module; a test may break the second.
s3 = pytest.fixture(_started, scope="module", name="s3")
own_s3 = pytest.fixture(_started, name="own_s3")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test opens, closed at its end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def join(database_url: str, stack: ExitStack) -> Join:
    """Another replica on the database of this test."""
    return lambda: stack.enter_context(closing(PostgresStore(shared_place(database_url))))


@pytest.fixture
def store(join: Join) -> PostgresStore:
    return join()
