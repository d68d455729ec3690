"""Every kind of store, for the tests of what all of them promise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.store.base import Store
from server.store.postgres.store import PostgresStore
from server.store.sqlite.store import MemoryStore, open_store
from server.store.table_store import StoreLimits
from tests.postgres import binaries
from tests.server.cluster.stores import shared_place
from tests.server.store.places import Place
from tests.server.store.records import IDENTITY

#: The shared one needs a PostgreSQL that is installed.
SHARED = [pytest.param("shared", marks=pytest.mark.database)]
STORES = ("memory", "full", "relaxed", *(SHARED if binaries() else ()))


def make_store(request: pytest.FixtureRequest, path: Path, limits: StoreLimits) -> Iterator[Store]:
    """The kind of store that is the fixture's parameter."""
    if request.param == "memory":
        made: Store = MemoryStore(limits=limits)
    elif request.param == "shared":
        place = shared_place(request.getfixturevalue("postgres").new_database())
        made = PostgresStore(place, limits)
    else:
        made = open_store(path / "store", IDENTITY, request.param, limits=limits)
    yield made
    made.close()


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    yield from make_store(request, tmp_path, StoreLimits())


@pytest.fixture(params=STORES)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store that keeps 1000 tokens of a log, and a session for an hour."""
    yield from make_store(request, tmp_path, StoreLimits(max_log_tokens=1000, retention_s=3600))


@pytest.fixture(params=["sqlite", *(SHARED if binaries() else ())])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A store of either database that is not there yet."""
    if request.param == "sqlite":
        return Place(tmp_path / "store")
    return Place(request.getfixturevalue("postgres").new_database())
