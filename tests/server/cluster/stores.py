"""Shared stores for tests, whose states are in the database as well."""

from __future__ import annotations

from collections.abc import Callable

from server.store.base import Identity
from server.store.postgres.link import SharedConnection, SharedPlace
from server.store.postgres.objects import TableObjects
from server.store.postgres.store import PostgresStore
from tests.server.one_model import SIGNING
from tests.server.store.records import IDENTITY, Writer, text_after

#: Opens one more replica on the database of the test.
Join = Callable[[], PostgresStore]


def shared_place(url: str, lease_s: float = 10.0, identity: Identity = IDENTITY) -> SharedPlace:
    """A place in the database at ``url``, for states as `records` makes them."""
    return SharedPlace(url, "everstream_test", identity, TableObjects, lease_s=lease_s)


def fake_place(url: str, lease_s: float = 10.0) -> SharedPlace:
    """For the states of the fake engine."""
    return shared_place(url, lease_s, SIGNING.identity)


def linked(store: PostgresStore) -> SharedConnection:
    """Its connection, which it has."""
    assert store._link.connection is not None
    return store._link.connection


def check_whole(store: PostgresStore, writer: Writer) -> None:
    """``store`` may have the session, and it is what was written."""
    loaded = store.load(writer.id, writer.value.owner)
    length = loaded.value.length
    assert text_after(length, loaded.entries)[length:] == writer.text[length:]
    assert length <= len(writer.text)
