"""What comes with a request to be kept beside its key: with the session, and no longer."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import apsw

from server.engine.value import Accepted, Record
from server.store.base import Store
from server.store.sqlite.check import problems
from server.store.sqlite.migrations import MIGRATIONS
from server.store.sqlite.store import open_store
from tests.server.store.records import IDENTITY, Writer

NOTE = '{"what": "was asked – “so”"}'  # noqa: RUF001


def noted(record: Record) -> Record:
    """The record of a request that has a note."""
    id, entry = record
    assert isinstance(entry, Accepted)
    return id, entry._replace(request=replace(entry.request, note=NOTE))


def note_of(store: Store, owner: str = "ann") -> str | None:
    keyed = store.find_key(owner, "k")
    return None if keyed is None else keyed.note


def test_is_found_under_the_key_from_the_first_commit_on(store: Store) -> None:
    writer = Writer()
    store.commit([writer.opened(), noted(writer.accepted(key="k"))])
    assert (note_of(store), note_of(store, "bob")) == (NOTE, None)
    store.commit([writer.token(), writer.finished()])
    assert note_of(store) == NOTE
    keyed = store.find_key("ann", "k")
    assert keyed is not None
    assert keyed.finished == writer.entries[-1]


def test_goes_with_its_session(store: Store) -> None:
    writer = Writer()
    store.commit([writer.opened(), noted(writer.accepted(key="k")), writer.finished()])
    store.commit([writer.deleted()])
    assert note_of(store) is None
    assert store.find_key("ann", "k") is not None


def test_goes_with_a_session_that_nobody_has_used_for_long(small: Store) -> None:
    writer = Writer()
    small.maintain(0.0)
    small.commit([writer.opened(), noted(writer.accepted(key="k")), writer.finished()])
    small.commit([writer.saved(evicted=True)])
    small.maintain(3599.0)
    assert note_of(small) == NOTE
    small.maintain(7300.0)
    assert note_of(small) is None


def test_counts_for_its_owner(store: Store) -> None:
    with_note, without = Writer("s1"), Writer("s2", "bob")
    store.commit([with_note.opened(), noted(with_note.accepted(key="k")), with_note.finished()])
    store.commit([without.opened(), without.accepted(key="k"), without.finished()])
    assert store.stored_bytes("ann") >= store.stored_bytes("bob") + len(NOTE)
    store.commit([with_note.deleted()])
    assert store.stored_bytes("ann") == 0


def test_is_there_after_a_crash_right_behind_the_commit(tmp_path: Path) -> None:
    path, writer = tmp_path / "store", Writer()
    store = open_store(path, IDENTITY)
    store.commit([writer.opened(), noted(writer.accepted(key="k")), writer.token()])
    shutil.copytree(path, tmp_path / "dead")  # as a process leaves it that dies now
    store.close()
    again = open_store(tmp_path / "dead", IDENTITY)
    assert note_of(again) == NOTE
    assert again.unfinished() == [("s1", "ann")]
    again.close()
    assert list(problems(tmp_path / "dead")) == []


def test_store_of_the_first_format_learns_to_keep_notes(tmp_path: Path) -> None:
    path = tmp_path / "store"
    open_store(path, IDENTITY).close()
    connection = apsw.Connection(str(path / "sessions.sqlite3"))
    for (table,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
    ).fetchall():
        connection.execute(f"DROP TABLE {table}")
    connection.execute(MIGRATIONS[0])
    connection.pragma("user_version", 1)
    connection.execute(
        "INSERT INTO request_key VALUES ('ann', 'old', 1, 's0', 'r', 0, 0, 0, NULL, NULL)"
    )
    connection.close()
    store, writer = open_store(path, IDENTITY), Writer()
    old = store.find_key("ann", "old")
    assert old is not None
    assert old.note is None
    store.commit([writer.opened(), noted(writer.accepted(key="k"))])
    assert note_of(store) == NOTE
    store.close()
