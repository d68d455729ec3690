"""Shared stores for tests."""

from __future__ import annotations

from server.distributed.objects import TableObjects
from server.distributed.postgres_store import SharedPlace
from tests.server.store.records import IDENTITY


def shared_place(url: str, lease_s: float = 10.0) -> SharedPlace:
    """A place in the database at ``url``, whose states are in the database as well."""
    return SharedPlace(
        url,
        "everstream_test",
        IDENTITY,
        lambda database: TableObjects(database.connection),
        lease_s=lease_s,
    )
