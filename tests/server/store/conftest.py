"""Every kind of store, for the tests of what all of them promise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.store.base import Store
from server.store.memory_store import MemoryStore
from server.store.postgres.store import PostgresStore
from server.store.saving import StoreLimits
from server.store.sqlite.store import open_store
from tests.postgres import binaries
from tests.server.cluster.stores import shared_place
from tests.server.store.records import IDENTITY

#: The shared one needs a PostgreSQL that is installed.
SHARED = [pytest.param("shared", marks=pytest.mark.database)]
STORES = ("memory", "full", "relaxed", *(SHARED if binaries() else ()))


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        made: Store = MemoryStore()
    elif request.param == "shared":
        made = PostgresStore(shared_place(request.getfixturevalue("postgres").new_database()))
    else:
        made = open_store(tmp_path / "store", IDENTITY, request.param)
    yield made
    made.close()


@pytest.fixture(params=STORES)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store that keeps 1000 tokens of a log, and a session for an hour."""
    if request.param == "memory":
        made: Store = MemoryStore(max_log_tokens=1000, retention_s=3600)
    elif request.param == "shared":
        place = shared_place(request.getfixturevalue("postgres").new_database())
        made = PostgresStore(place, StoreLimits(max_log_tokens=1000, retention_s=3600))
    else:
        limits = StoreLimits(max_log_tokens=1000, retention_s=3600)
        made = open_store(tmp_path / "store", IDENTITY, request.param, limits=limits)
    yield made
    made.close()
