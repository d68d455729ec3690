"""A store of the format of before is brought to the present one; an unknown format is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import apsw
import psycopg
import pytest

from server.store.errors import StoreError, StoreTooNew
from server.store.postgres import migrations as shared_migrations
from server.store.postgres.store import PostgresStore
from server.store.sqlite import database as sqlite_database
from server.store.sqlite.store import SqliteStore, open_store
from tests.server.cluster.stores import shared_place
from tests.server.store.conftest import SHARED
from tests.server.store.records import IDENTITY, Writer, text_after

#: What a second format would bring, and a step that fails after its first statement.
SECOND = "ALTER TABLE session ADD COLUMN colour text; UPDATE session SET colour = 'blue';"
BROKEN = "ALTER TABLE session ADD COLUMN colour text; SELECT nothing FROM nowhere;"


class Place(NamedTuple):
    """A store that is not open: ``url`` in PostgreSQL, else the folder ``path``."""

    migrations: ModuleType
    path: Path
    url: str | None

    def open(self) -> SqliteStore | PostgresStore:
        return (
            open_store(self.path, IDENTITY)
            if self.url is None
            else PostgresStore(shared_place(self.url))
        )

    def colours(self) -> list[tuple[object, ...]]:
        """The column of the second format. Raises errors of the database where it is not there."""
        query = "SELECT colour FROM session"
        if self.url is None:
            with closing(apsw.Connection(str(self.path / "sessions.sqlite3"))) as connection:
                return list(connection.execute(query))
        with psycopg.connect(self.url) as database:
            database.execute("SET search_path TO everstream_test")
            return database.execute(query).fetchall()


@pytest.fixture(params=["sqlite", *SHARED])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A store of the first format, in which one session runs."""
    if request.param == "sqlite":
        made = Place(sqlite_database, tmp_path / "store", None)
    else:
        url = request.getfixturevalue("postgres").new_database()
        made = Place(shared_migrations, tmp_path, url)
    with closing(made.open()) as store:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(3), writer.saved(), writer.accepted()])
    return made


def test_the_next_format_is_reached_with_all_that_there_was(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (*place.migrations.MIGRATIONS, SECOND)
    monkeypatch.setattr(place.migrations, "MIGRATIONS", both)
    for _ in range(2):  # it is migrated once
        with closing(place.open()) as store:
            loaded = store.load("s1", "ann")
            assert len(text_after(loaded.value.length, loaded.entries)) == 7
        assert place.colours() == [("blue",)]
    monkeypatch.setattr(place.migrations, "MIGRATIONS", both[:1])
    with pytest.raises(StoreTooNew, match=r"has format 2, .* knows 1: use a newer one"):
        place.open()


def test_a_step_that_fails_changes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(place.migrations, "MIGRATIONS", (*place.migrations.MIGRATIONS, BROKEN))
        with pytest.raises(StoreError):
            place.open()
    with pytest.raises((apsw.SQLError, psycopg.errors.UndefinedColumn)):
        place.colours()
    with closing(place.open()) as store:
        assert store.unfinished() == [("s1", "ann")]
