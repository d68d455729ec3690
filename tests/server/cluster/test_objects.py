"""States in object storage, and in a table of PostgreSQL within the caller's transactions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from server.store.base import SnapshotBroken, StoreFailed
from server.store.postgres.database import connect
from server.store.postgres.objects import Connection, Objects, TableObjects
from server.store.postgres.s3 import S3Objects
from tests.s3_server import S3Server

TABLE = """
    CREATE TABLE object (name text PRIMARY KEY, data bytea NOT NULL);
    ALTER TABLE object ALTER COLUMN data SET STORAGE EXTERNAL;
"""


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    with connect(database_url) as made:
        made.execute(TABLE)
        yield made


def names(connection: Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM object")}


@pytest.fixture(params=["table", "s3"])
def objects(
    request: pytest.FixtureRequest, connection: Connection, s3: S3Server
) -> Iterator[Objects]:
    if request.param == "table":
        yield TableObjects(connection)
    else:
        with closing(S3Objects(s3.url(s3.new_bucket()), {})) as objects:
            yield objects


def test_put_objects_round_trip(objects: Objects) -> None:
    state = os.urandom(5_000_000)
    objects.put("a/b", [state[:1], memoryview(state)[1:]])
    assert objects.get("a/b") == state
    objects.put("a/b", [b"\0\xff", memoryview(b"two"), b""])
    assert objects.get("a/b") == b"\0\xfftwo"
    objects.put("empty", [])
    assert objects.get("empty") == b""


def test_missing_object_is_a_broken_state(objects: Objects) -> None:
    objects.put("a", [b"1"])
    with pytest.raises(SnapshotBroken):
        objects.get("b")


def test_deleted_objects_are_gone_and_others_stay(objects: Objects) -> None:
    for name in "abc":
        objects.put(name, [name.encode()])
    objects.delete([])
    objects.delete(["a", "never", "c"])
    objects.delete(["a"])
    assert objects.get("b") == b"b"
    for name in "ac":
        with pytest.raises(SnapshotBroken):
            objects.get(name)


def test_rolled_back_transaction_undoes_puts_and_deletes(connection: Connection) -> None:
    objects = TableObjects(connection)
    objects.put("old", [b"1"])
    with connection.transaction(force_rollback=True):
        objects.put("new", [b"2"])
        objects.delete(["old"])
        assert names(connection) == {"new"}
    assert names(connection) == {"old"}
    with connection.transaction():
        objects.put("new", [b"2"])
    assert names(connection) == {"old", "new"}


def test_lost_connection_is_a_failed_store(connection: Connection, database_url: str) -> None:
    objects = TableObjects(connection)
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
    with pytest.raises(StoreFailed):
        objects.put("a", [b"1"])
    with pytest.raises(StoreFailed):
        objects.get("a")
    with pytest.raises(StoreFailed):
        objects.delete(["a"])


def test_close_keeps_the_callers_connection_open(connection: Connection) -> None:
    TableObjects(connection).close()
    assert names(connection) == set()
