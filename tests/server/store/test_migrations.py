"""A store of the format of before is brought to the present one; an unknown format is refused."""

from __future__ import annotations

from contextlib import closing
from types import ModuleType

import apsw
import psycopg
import pytest

from server.store.base import StoreError, StoreTooNew
from server.store.postgres import database as postgres_tables
from server.store.sqlite import database as sqlite_tables
from tests.server.store.places import Place, to_format_1
from tests.server.store.records import Writer, block, text_after

#: What the next format would bring, and a step that fails after its first statement.
NEXT = "ALTER TABLE session ADD COLUMN colour text; UPDATE session SET colour = 'blue';"
BROKEN = "ALTER TABLE session ADD COLUMN colour text; SELECT nothing FROM nowhere;"
COLOURS = "SELECT colour FROM session"


@pytest.fixture
def module(place: Place) -> ModuleType:
    """The one that has the migrations; at ``place`` one session runs in a store of the newest."""
    with closing(place.open()) as store:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(3), writer.saved(), writer.accepted()])
    return postgres_tables if place.is_shared else sqlite_tables


def test_the_next_format_is_reached_with_all_that_there_was(
    place: Place, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = module.MIGRATIONS
    monkeypatch.setattr(module, "MIGRATIONS", (*known, NEXT))
    for _ in range(2):  # it is migrated once
        with closing(place.open()) as store:
            loaded = store.load("s1", "ann")
            assert len(text_after(loaded.value.length, loaded.entries)) == 7
        assert place.execute(COLOURS) == [("blue",)]
    monkeypatch.setattr(module, "MIGRATIONS", known)
    with pytest.raises(
        StoreTooNew,
        match=rf"has format {len(known) + 1}, .* knows {len(known)}: use a newer one",
    ):
        place.open()


def test_a_step_that_fails_changes_nothing(
    place: Place, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "MIGRATIONS", (*module.MIGRATIONS, BROKEN))
        with pytest.raises(StoreError):
            place.open()
    with pytest.raises((apsw.SQLError, psycopg.errors.UndefinedColumn)):
        place.execute(COLOURS)
    with closing(place.open()) as store:
        assert store.unfinished() == [("s1", "ann")]


def test_snapshots_of_format_1_are_found_for_their_whole_texts(place: Place) -> None:
    """Those within a prompt that the new version makes are found for shorter ones, too."""
    writer = Writer()
    with closing(place.open()) as store:
        store.commit([writer.opened(), *writer.turn(3), writer.saved()])
        store.maintain(0.0)
        store.commit([writer.accepted(tuple(range(100))), writer.saved_within(30)])
        store.maintain(1.0)
    to_format_1(place)
    with closing(place.open()) as store:
        assert [store.load("s1", "ann", at).value.position for at in (104, 105)] == [5, 30]
        store.commit([writer.saved_within(60), writer.finished(None)])
        store.maintain(2.0)
        ats = (105, 61, 60)
        assert [store.load("s1", "ann", at).value.position for at in ats] == [60, 60, 5]
        loaded = store.load("s1", "ann", 40)
        assert text_after(5, loaded.entries)[5:40] == writer.text[5:40]
        store.commit([writer.rewound(61)])
        store.maintain(3.0)
        ats = (61, 60)
        assert [store.load("s1", "ann", at).value.position for at in ats] == [61, 5]
        state = store.load("s1", "ann").value.state
        assert state is not None
        assert bytes(state.data) == bytes(block(61).data)
