"""Shared stores for tests, whose states are in the database as well."""

from __future__ import annotations

from server.store.base import Identity
from server.store.object_storage.objects import TableObjects
from server.store.postgres.link import SharedPlace
from tests.server.one_model import SIGNING
from tests.server.store.records import IDENTITY


def shared_place(url: str, lease_s: float = 10.0, identity: Identity = IDENTITY) -> SharedPlace:
    """A place in the database at ``url``, for states as `records` makes them."""
    return SharedPlace(url, "everstream_test", identity, TableObjects, lease_s=lease_s)


def fake_place(url: str, lease_s: float = 10.0) -> SharedPlace:
    """For the states of the fake engine."""
    return shared_place(url, lease_s, SIGNING.identity)
